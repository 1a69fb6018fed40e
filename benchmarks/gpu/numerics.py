"""Attention's kernels in the types that serve, beside torch in float32: every variant of a layer. Times nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.gpu.target import TABLE, Target, side_by_side
from engine.attention.backend import make_attention_backend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.paged_attention import Softmax
from engine.kernels.triton import checksum
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import PageChecksum
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch, TreePaths
from engine.layers.latents import NewLatents
from engine.layers.linear import RMSNorm
from engine.layers.rope import NormedRope, Unturned

PAGE_SIZE = 16
TOLERANCE = {"bfloat16": 4e-2, "float32": 1e-3}  # on values up to 4 or so: one step of bf16 there
CODES_TOLERANCE = 0.25  # one step of a code there: a norm that rounds otherwise may turn one into the next
TREE = ((), (0,), (0,), (0, 1))  # of each draft the drafts above it, by depth; the first is the newest token


@dataclass(frozen=True, slots=True)
class Case:
    """A layer. `rank`: of latents, the first elements of K that are V. `trees`: single tokens come as TREE. `fp8`: KV is codes."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    rank: int = 0
    units: int = 1
    trees: bool = False
    fp8: bool = False
    dtype: str = "bfloat16"


CASES, SMALL = (msgspec.convert(TABLE[name], dict[str, Case]) for name in ("cases", "small_cases"))


def numerics(target: Target) -> dict[str, Any]:
    """Turns, a prompt in two chunks, then single tokens, of which some were in the chunk's step; raises where they differ."""
    cases = target.pick(CASES, SMALL)
    errors = side_by_side(target, {name: partial(worst_error, target, case) for name, case in cases.items()})
    rows = [{"case": name, "error": error} for name, error in errors.items()]
    target.keep({"rows": rows})
    right = [name for name, error in errors.items() if not isinstance(error, str) and error < _tolerance(cases[name])]
    if wrong := [f"{name}: {error}" for name, error in errors.items() if name not in right]:
        raise AssertionError(f"beside torch, at most {TOLERANCE}: {'; '.join(wrong)}")
    return {"rows": rows, "checksum": _check_checksum(target)}


def _tolerance(case: Case) -> float:
    return CODES_TOLERANCE if case.fp8 else TOLERANCE[case.dtype]


def worst_error(target: Target, case: Case, *, lengths: Sequence[int] = ()) -> float:
    """Return the largest difference from torch in float32, over steps of requests of these final `lengths`."""
    lengths = list(lengths) or target.pick([1, 37, 700, 4100], [1, 20])
    exact_dtype = case.dtype if case.fp8 else "float32"
    (pool, table), (exact, _) = (
        make_pool(case, target, dtype=dtype, batch=len(lengths), context=max(lengths) + 1 + len(TREE))
        for dtype in (case.dtype, exact_dtype)
    )
    if case.fp8:
        exact.buffer.copy_(pool.buffer)
    else:
        for unit in range(case.units):
            exact.k(0, unit).copy_(pool.k(0, unit))
            exact.v(0, unit).copy_(pool.v(0, unit))
    kernel = make_attention_backend("triton", pool, num_heads=case.heads)
    assert isinstance(kernel, TritonBackend)
    reference, worst = make_attention_backend("torch", exact, num_heads=case.heads), list[Tensor]()
    for step in _steps(case, lengths, table):
        new = _Drawn(case, len(step.token_pages), target.device)
        kernel.begin(step)
        outs = [kernel.attend(0, new.of(case.dtype))]
        kernel.begin_on_device(_on_device(step))
        outs.append(kernel.attend(0, new.of(case.dtype)))
        reference.begin(step)
        right = reference.attend(0, new.of(exact_dtype))
        worst += [(out.float() - right.float()).abs().max() for out in outs]
    return float(torch.stack(worst).max())  # NaN if any is


class _Drawn:
    """New tokens of a step: as many rows of random values, with weights of norms and angles."""

    def __init__(self, case: Case, rows: int, device: torch.device) -> None:
        self._case, dtype = case, getattr(torch, case.dtype)
        heads, angles = case.heads + case.kv_heads, 2 * torch.pi * torch.rand(rows, 1, case.dim // 2)
        drawn = (
            torch.randn(rows, heads + case.kv_heads, case.dim),
            0.5 + torch.rand(heads, case.dim),
            torch.cat((angles.cos(), angles.cos()), -1),
            torch.cat((-angles.sin(), angles.sin()), -1),
        )
        self._drawn = [x.to(device, dtype) for x in drawn]
        sinks = torch.linspace(-3, 3, case.heads, device=device) if case.sinks else None
        self._softmax = Softmax(case.dim**-0.5, case.cap, sinks)

    def of(self, dtype: str) -> Unturned | NewLatents:
        """Return copies, which attention may change."""
        case = self._case
        qkv, weight, cosine, sine = (x.to(getattr(torch, dtype), copy=True) for x in self._drawn)
        if case.rank:
            q, latents, rest = qkv[:, : case.heads].contiguous(), qkv[:, case.heads], case.dim - case.rank
            norm = RMSNorm(weight[0, : case.rank].contiguous(), eps=1e-6)
            turn = (cosine[:, :, :rest], sine[:, :, :rest])
            return NewLatents(q, q[:, :, case.rank :].clone(), latents, norm, turn, self._softmax.scale)
        rope = NormedRope(weight, like=qkv, eps=1e-6)
        return Unturned(qkv, case.kv_heads, rope, (cosine, sine), self._softmax)


def _steps(case: Case, lengths: list[int], table: Tensor) -> Iterator[StepBatch]:
    begins = [0 for _ in lengths]
    for ends in ([max(1, n // 3) for n in lengths], lengths, [n + 1 for n in lengths]):
        ends = [max(end, begin + 1) for begin, end in zip(begins, ends, strict=True)]
        step = make_step(begins, ends, table)
        if step.extend:
            step = replace(step, riders=[i for i, n in enumerate(step.q_lens) if n == 1 and begins[i]])
        elif case.trees:
            step = _tree_step(begins, table)
        yield step
        begins = ends


def make_step(begins: Sequence[int], ends: Sequence[int], table: Tensor) -> StepBatch:
    """Of all tokens from `begins` to `ends`."""
    q_lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
    places = [(i, p) for i, (begin, end) in enumerate(zip(begins, ends, strict=True)) for p in range(begin, end)]
    extend = any(n > 1 for n in q_lens)
    return _step(places, table, extend=extend, q_lens=q_lens, kv_lens=list(ends), requests=range(len(q_lens)))


def _tree_step(known: Sequence[int], table: Tensor) -> StepBatch:
    """A tree behind the `known` tokens of each request."""
    nodes = [(i, n, node) for i, n in enumerate(known) for node in range(len(TREE))]
    paths = [[n + above for above in TREE[node]] + [n + node] for _, n, node in nodes]
    step = _step(
        [(i, n + node) for i, n, node in nodes],
        table,
        extend=False,
        q_lens=[1] * len(nodes),
        kv_lens=[n + len(path) for (_, n, _), path in zip(nodes, paths, strict=True)],
        requests=[i for i, _, _ in nodes],
    )
    starts = torch.tensor([n for _, n, _ in nodes], dtype=torch.int32, device=table.device)
    width = max(map(len, paths))
    padded = torch.tensor([path + [0] * (width - len(path)) for path in paths], dtype=torch.int32, device=table.device)
    drafted = frozenset(row for row, (_, _, node) in enumerate(nodes) if node)
    return replace(step, drafted=drafted, paths=TreePaths(starts, padded))


def _step(places: Sequence[tuple[int, int]], table: Tensor, *, requests: Sequence[int], **lengths: Any) -> StepBatch:
    """`places`: (request, position) of each token. `requests`: of each row of `lengths`."""
    rows, positions = torch.tensor(places, device=table.device).unbind(1)
    return StepBatch(
        page_table=table,
        slots=torch.tensor(requests, device=table.device),
        token_pages=table[rows, positions // PAGE_SIZE].to(torch.int64),
        token_offsets=positions % PAGE_SIZE,
        **lengths,
    )


def _on_device(step: StepBatch) -> DeviceStep | DeviceExtend:
    """As a graph sees it."""
    lists = (torch.tensor(x, dtype=torch.int32, device=step.slots.device) for x in (step.kv_lens, [0, *step.q_lens]))
    (kv_lens, counts), places = lists, (step.token_pages, step.token_offsets)
    if not step.extend:
        return DeviceStep(step.page_table, step.slots, kv_lens, *places, step.paths)
    return DeviceExtend(step.page_table, step.slots, counts.cumsum(0, dtype=torch.int32), kv_lens, *places)


def make_pool(
    case: Case, target: Target, *, batch: int, context: int, dtype: str = "", layers: int = 1
) -> tuple[KVPool, Tensor]:
    """Random K and V in the first layer, and a page table [batch, pages] whose pages are scattered."""
    pages = -(-context // PAGE_SIZE)
    kind = {"window": case.window, "latent": case.rank, "fp8": case.fp8}
    spec = CacheSpec(case.kv_heads, case.dim, dtype or case.dtype, **kind)
    pool = KVPool([spec] * layers, num_pages=batch * pages, page_size=PAGE_SIZE, device=target.device, units=case.units)
    if case.fp8:
        _write_all(pool)
    else:
        for unit in range(case.units):
            for cache in (pool.k(0, unit), pool.v(0, unit)):
                cache.normal_()
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)) + 1
    return pool, order.view(batch, pages).to(dtype=torch.int32, device=target.device)


def _write_all(pool: KVPool) -> None:
    """Random values in all tokens of the first layer."""
    spec, places = pool.specs[0], torch.arange(pool.k(0)[:, :, 0, 0].numel(), device=pool.device)
    for some in places.split(1 << 14):
        k, v = torch.randn(2, len(some), spec.num_kv_heads, spec.head_dim, device=pool.device)
        pool.write(0, some // PAGE_SIZE, some % PAGE_SIZE, k, v)


def _check_checksum(target: Target) -> bool:
    """The kernel's sums of pages are the CPU's."""
    pool, table = make_pool(Case(8, 8, 128, units=2), target, batch=1, context=target.pick(1000, 40))
    on_cpu = KVPool(pool.specs, num_pages=pool.num_pages, page_size=PAGE_SIZE, device="cpu", units=pool.units)
    on_cpu.buffer.copy_(pool.buffer)
    pages = table[0].tolist()
    for tokens in (None, PAGE_SIZE // 2):  # whole pages, and a last one that ends early
        found = PageChecksum(pool, sums=checksum.triton_sums)(pages, tokens)
        assert found() == PageChecksum(on_cpu)(pages, tokens)(), "another checksum of pages than the CPU's"
    return True
