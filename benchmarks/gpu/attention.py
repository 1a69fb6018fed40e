"""Attention kernels alone: decode of 64 requests at 4k and extend over a prefix against the memory, extend at 8k against products.

Other cuts of the work are tried beside the ones in use: what to look at first where a target is missed. `deep`: the same in
a pool of all layers, whose pages lie as far apart as a worker's.
"""

import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.target import QWEN3_8B, TINY, Shape, Target
from engine.attention.backend import AttentionBackend
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.paged_attention import plain_softmax
from engine.kernels.triton.decode import DecodeTiles, PagedLayer, decode, decode_tiles, split_list
from engine.kernels.triton.extend import ExtendTiles, extend, extend_tiles, lists_of, work_of
from engine.kernels.triton.extend_plan import ExtendShape, plan_extend
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.layers.rope import NormedRope, Unturned

PAGE_SIZE = 16
TILES = tomllib.loads(Path(__file__).with_name("parts.toml").read_text())["tiles"]
TOLERANCE = {"bfloat16": 4e-2, "float32": 1e-3}  # beside torch, on values up to 4 or so: one step of bf16 there


def decode_bandwidth(target: Target) -> dict[str, Any]:
    shape = target.pick(QWEN3_8B, TINY)
    batch, context = target.pick((64, 4096), (2, 40))
    pool, table = _pool(shape, batch=batch, context=context, target=target)
    q = torch.randn(batch, shape.heads, shape.head_dim, device=target.device).to(pool.k(0).dtype)
    kv_lens = torch.full((batch,), context, dtype=torch.int32, device=target.device)
    slots = torch.arange(batch, device=target.device)

    def run(tiles: DecodeTiles, pool: KVPool = pool, table: torch.Tensor = table) -> float:
        splits = split_list(kv_lens, kv_heads=shape.kv_heads, tiles=tiles)
        layers = cycle(range(pool.num_layers))

        def work() -> torch.Tensor:
            layer = next(layers)
            pages = PagedLayer(pool.k(layer), pool.v(layer), table, plain_softmax(shape.head_dim))
            return decode(q, pages, slots=slots, kv_lens=kv_lens, splits=splits, tiles=tiles)

        return target.ms(work)

    size = 2 * batch * context * shape.kv_heads * shape.head_dim * 2
    used = decode_tiles(kv_heads=shape.kv_heads, dim=shape.head_dim, dtype=pool.k(0).dtype)
    rows = _tried(run, used, target.pick(TILES["decode"], []))
    deep_pool, deep_table = _pool(shape, batch=batch, context=context, target=target, layers=shape.layers, spread=2)
    deep = {"pool_bytes": deep_pool.buffer.nbytes, "ms": run(used, deep_pool, deep_table)}
    for row in (*rows, deep):
        row["gb_s"] = size / row["ms"] / 1e6
        row["of_copy"] = target.share(row["gb_s"], "copy_gb_s")
    return {"batch": batch, "context": context, "kv_bytes": size, **rows[0], "deep": deep, "others": rows[1:]}


def extend_rate(target: Target) -> dict[str, Any]:
    shape = target.pick(QWEN3_8B, TINY)
    tokens = target.pick(8192, 40)
    pool, table = _pool(shape, batch=1, context=tokens, target=target)
    flop = 2 * tokens * tokens * shape.heads * shape.head_dim
    used = extend_tiles(dim=shape.head_dim, dtype=pool.k(0).dtype)
    run = partial(_extend_ms, target, shape, pool, table, rows=tokens, context=tokens)
    rows = _tried(run, used, target.pick(TILES["extend"], []))
    rows += _library_rows(target, shape, tokens)
    for row in rows:
        if "ms" in row:
            row["tflop_s"] = flop / row["ms"] / 1e9
            row["of_bf16"] = target.share(row["tflop_s"], "bf16_tflop_s")
    prefix = _behind_a_prefix(target, shape, used)
    return {"tokens": tokens, "flop": flop, **rows[0], "prefix": prefix, "others": rows[1:]}


def _behind_a_prefix(target: Target, shape: Shape, tiles: ExtendTiles) -> dict[str, Any]:
    """Time a follow-up turn: few new tokens behind a long cached prompt, bound by the bytes of its K and V."""
    rows, context = target.pick((50, 32768), (3, 40))
    pool, table = _pool(shape, batch=1, context=context, target=target)
    ms = _extend_ms(target, shape, pool, table, tiles, rows=rows, context=context)
    gb_s = 2 * context * shape.kv_heads * shape.head_dim * 2 / ms / 1e6
    return {"rows": rows, "context": context, "ms": ms, "gb_s": gb_s, "of_copy": target.share(gb_s, "copy_gb_s")}


def _extend_ms(
    target: Target, shape: Shape, pool: KVPool, table: torch.Tensor, tiles: ExtendTiles, *, rows: int, context: int
) -> float:
    q = torch.randn(rows, shape.heads, shape.head_dim, device=target.device).to(pool.k(0).dtype)
    starts, kv_lens = (torch.tensor(x, dtype=torch.int32, device=target.device) for x in ([0, rows], [context]))
    slots = torch.zeros(1, dtype=torch.int64, device=target.device)
    group = shape.heads // shape.kv_heads
    cut = ExtendShape(group=group, kv_heads=shape.kv_heads, rows=tiles.rows, block=tiles.block)
    plan = plan_extend([rows], [context], cut)
    lists = (torch.tensor(x, dtype=torch.int32, device=target.device) for x in lists_of(plan))
    work = work_of(plan, lists)
    pages = PagedLayer(pool.k(0), pool.v(0), table, plain_softmax(shape.head_dim))
    return target.ms(lambda: extend(q, pages, slots=slots, starts=starts, kv_lens=kv_lens, work=work, tiles=tiles))


def numerics(target: Target) -> dict[str, Any]:
    """The compiled kernels beside torch: turns, a prompt in two chunks, then single tokens; raises where they differ."""
    dtypes = target.pick(("bfloat16", "float32"), ("float32",))  # the interpreter multiplies no bf16
    heads = target.pick(((128, 8), (64, 8), (256, 2), (128, 1)), ((16, 2),))
    cases = [(Shape(1, 0, 0, 4 * kv_heads, kv_heads, dim, 0), dtype) for dtype in dtypes for dim, kv_heads in heads]
    if target.small:
        errors = [worst_error(target, *case) for case in cases]
    else:  # each case compiles for a minute or so, on a core of its own
        with ProcessPoolExecutor(len(cases), mp_context=get_context("spawn")) as pool:
            errors = list(pool.map(partial(_case_error, target), cases))
    found = {
        f"{dtype}, {shape.kv_heads} x {shape.head_dim}": error
        for (shape, dtype), error in zip(cases, errors, strict=True)
    }
    for (_, dtype), (name, error) in zip(cases, found.items(), strict=True):
        if not error < TOLERANCE[dtype]:
            raise AssertionError(f"{name}: {error} beside torch, at most {TOLERANCE[dtype]}")
    return found


def _case_error(target: Target, case: tuple[Shape, str]) -> float:
    torch.set_grad_enabled(False)
    return worst_error(target, *case)


def worst_error(target: Target, shape: Shape, dtype: str, *, lengths: Sequence[int] = ()) -> float:
    """Return the largest difference from torch, over three steps of requests of these final `lengths`."""
    lengths = list(lengths) or target.pick([1, 37, 700, 4100], [1, 20])
    pools = [_pool(shape, batch=len(lengths), context=max(lengths) + 1, target=target, dtype=dtype) for _ in range(2)]
    table = pools[0][1]
    pools[1][0].buffer.copy_(pools[0][0].buffer)
    backends: list[AttentionBackend] = [TritonBackend(pools[0][0], num_heads=shape.heads), TorchBackend(pools[1][0])]
    worst = 0.0
    begins = [0 for _ in lengths]
    for ends in ([max(1, n // 3) for n in lengths], lengths, [n + 1 for n in lengths]):
        if any(end == begin for begin, end in zip(begins, ends, strict=True)):
            ends = [max(end, begin + 1) for begin, end in zip(begins, ends, strict=True)]
        step = _step(begins, ends, table, target.device)
        new = _new_tokens(shape, rows=sum(step.q_lens), dtype=dtype, target=target)
        outs = []
        for backend in backends:
            backend.begin(step)
            outs.append(backend.attend(0, replace(new, qkv=new.qkv.clone())).float())
        worst = max(worst, float((outs[0] - outs[1]).abs().max()))
        begins = ends
    return worst


def _new_tokens(shape: Shape, *, rows: int, dtype: str, target: Target) -> Unturned:
    """Random q, k and v, weights of norms and angles."""
    dim, heads = shape.head_dim, shape.heads + shape.kv_heads
    angles = 2 * torch.pi * torch.rand(rows, 1, dim // 2)
    drawn = (
        torch.randn(rows, heads + shape.kv_heads, dim),
        0.5 + torch.rand(heads, dim),
        torch.cat((angles.cos(), angles.cos()), -1),
        torch.cat((-angles.sin(), angles.sin()), -1),
    )
    qkv, weight, cosine, sine = (x.to(target.device, getattr(torch, dtype)) for x in drawn)
    return Unturned(qkv, shape.kv_heads, NormedRope(weight, like=qkv, eps=1e-6), (cosine, sine), plain_softmax(dim))


def _step(begins: list[int], ends: list[int], table: torch.Tensor, device: torch.device) -> StepBatch:
    q_lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
    positions = torch.tensor([p for begin, end in zip(begins, ends, strict=True) for p in range(begin, end)])
    positions = positions.to(device)
    requests = torch.tensor([i for i, n in enumerate(q_lens) for _ in range(n)]).to(device)
    return StepBatch(
        extend=any(n > 1 for n in q_lens),
        q_lens=q_lens,
        kv_lens=ends,
        page_table=table,
        slots=torch.arange(len(q_lens), device=device),
        token_pages=table[requests, positions // PAGE_SIZE].to(torch.int64),
        token_offsets=positions % PAGE_SIZE,
    )


def _pool(
    shape: Shape, *, batch: int, context: int, target: Target, dtype: str = "", layers: int = 1, spread: int = 1
) -> tuple[KVPool, torch.Tensor]:
    """Random K and V, and a page table [batch, pages] whose pages are scattered over `spread` times as many."""
    pages = -(-context // PAGE_SIZE)
    dtype = dtype or target.dtype
    spec = CacheSpec(num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype)
    num_pages = batch * pages * spread
    pool = KVPool([spec] * layers, num_pages=num_pages, page_size=PAGE_SIZE, device=target.device)
    for layer in range(layers):
        for cache in (pool.k(layer), pool.v(layer)):
            cache.normal_()
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))[: batch * pages] + 1
    return pool, order.view(batch, pages).to(dtype=torch.int32, device=target.device)


def _tried(run: Any, used: Any, changes: list[dict[str, int]]) -> list[dict[str, Any]]:
    """A row each, the one in use first; one that does not fit this GPU says why."""
    rows = [{"tiles": asdict(used), "ms": run(used)}]
    for tiles in (replace(used, **change) for change in changes):
        try:
            rows.append({"tiles": asdict(tiles), "ms": run(tiles)})
        except Exception as error:
            print(f"{tiles}: {error}", flush=True)
    return rows


def _library_rows(target: Target, shape: Shape, tokens: int) -> list[dict[str, Any]]:
    """Time torch's own attention over contiguous K and V: as it chooses, and cuDNN's, which is of FlashAttention-3's class."""
    q, k, v = (torch.randn(1, shape.heads, tokens, shape.head_dim, device=target.device).bfloat16() for _ in range(3))
    libraries = {"torch": nullcontext(), "cuDNN": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}
    rows: list[dict[str, Any]] = []
    for name in target.pick(("torch", "cuDNN"), ("torch",)):
        row: dict[str, Any] = {"tiles": f"{name}, contiguous K and V of every head"}
        try:
            with libraries[name]:
                row["ms"] = target.ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
        except RuntimeError as error:
            row["error"] = str(error)[:200]
        rows.append(row)
    return rows
