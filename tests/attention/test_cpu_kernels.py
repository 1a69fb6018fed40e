"""The C kernels of single tokens and of prompts against float64, what their bits depend on, and how they get built."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kernels import build
from engine.kernels.build import Kind
from engine.kernels.paged_attention import EXTEND, PagedExtend, Softmax, make_paged_decode
from engine.kv.kv_pool import KVPool
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    Sequence,
    attend,
    fill,
    filled_pool,
    make_pool,
    make_sequences,
    make_step,
    pages_needed,
    poisoned_pool,
    reference,
    run_step,
    worst_error,
)
from tests.kernels.test_linear import kinds, threads

BF16 = "bfloat16"
BORDERS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 192, 257, 300]
# Around tiles (16), steps (32) and blocks of keys (256); prompts whole, and chunks behind a prefix.
STARTS = [0, 0, 0, 255, 31, 511]
ENDS = [1, 17, 300, 257, 64, 530]


def kernel_of(kind: Kind, pool: KVPool) -> PagedExtend:
    library = EXTEND.load(kind=kind)
    assert library is not None
    return PagedExtend(library, pool)


@dataclass(frozen=True)
class Way:
    """Prompts by a `kind` of arithmetic, or single tokens by the decode kernel."""

    dtype: str = BF16
    kind: Kind | None = None

    def __str__(self) -> str:
        return f"decode {self.dtype}" if self.kind is None else f"extend {self.kind.label}"

    def backend(self, pool: KVPool) -> CpuBackend | PagedExtend:
        if self.kind is not None:
            return kernel_of(self.kind, pool)
        backend = CpuBackend(pool)
        assert backend.has_kernel
        return backend

    def starts(self, starts: list[int], ends: list[int]) -> list[int]:
        return starts if self.kind is not None else [end - 1 for end in ends]

    def run(self, pool: KVPool, sequences: list[Sequence], starts: list[int], ends: list[int]) -> list[torch.Tensor]:
        extend, starts = self.kind is not None, self.starts(starts, ends)
        return run_step(self.backend(pool), sequences, starts, ends, page_size=pool.page_size, extend=extend)

    def poisoned(
        self, heads: Heads, sequences: list[Sequence], starts: list[int], ends: list[int], *, page_size: int = 16
    ) -> list[torch.Tensor]:
        """NaN lies in all that must not be read."""
        pool = poisoned_pool(heads, [len(s.q) for s in sequences], page_size=page_size, dtype=self.dtype)
        fill(pool, sequences, self.starts(starts, ends))
        return self.run(pool, sequences, starts, ends)


DECODES = [Way("float32"), Way(BF16)]
EXTENDS = [Way(kind=kind) for kind in kinds()]
ways = pytest.mark.parametrize("way", [*DECODES, *EXTENDS], ids=str)
extends = pytest.mark.parametrize("way", EXTENDS, ids=str)


def check_equal(way: Way, heads: Heads, starts: list[int], ends: list[int], *, page_size: int) -> None:
    sequences = make_sequences(heads, ends, page_size=page_size, dtype=way.dtype)
    outs = way.poisoned(heads, sequences, starts, ends, page_size=page_size)
    assert worst_error(outs, sequences, way.starts(starts, ends), ends) < TOLERANCE[way.dtype]


# Of numbers of heads, head dims and page sizes any two meet.
HEADS, DIMS, PAGES = [(2, 1), (2, 2), (2, 4), (1, 8)], [16, 32, 64, 128], [1, 16, 64]
COMMON = [(*HEADS[i], dim, PAGES[(i + j) % 3]) for i in range(4) for j, dim in enumerate(DIMS)]
UNCOMMON = [(1, 16, 48), (3, 5, 80), (1, 11, 256), (1, 6, 112), (2, 7, 16), (1, 3, 96), (8, 8, 32), (3, 13, 16)]


@pytest.mark.parametrize("way", DECODES, ids=str)
@pytest.mark.parametrize(
    ("kv", "group", "dim", "page_size"), [*COMMON, *((kv, group, dim, 8) for kv, group, dim in UNCOMMON)]
)
def test_single_tokens_of_any_shape_equal_the_reference(
    way: Way, kv: int, group: int, dim: int, page_size: int
) -> None:
    check_equal(way, Heads(q=kv * group, kv=kv, dim=dim), [], BORDERS, page_size=page_size)


@extends
@pytest.mark.parametrize(
    ("kv", "group", "dim", "page_size"),
    [(2, 2, 128, 16), (2, 1, 64, 1), (1, 3, 96, 64), (3, 5, 16, 8), (1, 7, 48, 16), (1, 9, 80, 16), (1, 2, 256, 16)],
)
def test_prompts_of_any_shape_equal_the_reference(way: Way, kv: int, group: int, dim: int, page_size: int) -> None:
    check_equal(way, Heads(q=kv * group, kv=kv, dim=dim), STARTS, ENDS, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 16])
def test_single_tokens_behind_every_length(page_size: int) -> None:
    check_equal(Way("float32"), Heads(q=2, kv=1, dim=16), [], list(range(1, 301)), page_size=page_size)


@ways
def test_batch_mates_and_pages_do_not_change_the_bits(way: Way) -> None:
    """Page numbers of a pool of its own, so that the place in memory differs too."""
    heads = Heads(q=4, kv=2, dim=64)
    sequences = make_sequences(heads, ENDS, page_size=16, dtype=way.dtype)
    together = way.poisoned(heads, sequences, STARTS, ENDS)
    for s, start, end, out in zip(sequences, STARTS, ENDS, together, strict=True):
        alone = Sequence(q=s.q, k=s.k, v=s.v, pages=list(range(1, len(s.pages) + 1)))
        assert torch.equal(way.poisoned(heads, [alone], [start], [end])[0], out)


@ways
@pytest.mark.parametrize(("kv", "lengths"), [(2, BORDERS), (5, [90] * 4), (3, [200]), (2, ENDS)], ids=str)
def test_threads_do_not_change_the_bits(way: Way, kv: int, lengths: list[int]) -> None:
    """Whatever runs the kv heads are cut into: all together, 2 and 3, or one by one."""
    heads, starts = Heads(q=2 * kv, kv=kv, dim=64), STARTS if lengths is ENDS else [0] * len(lengths)
    sequences = make_sequences(heads, lengths, page_size=16, dtype=way.dtype)
    one = way.poisoned(heads, sequences, starts, lengths)
    for count in (2, 3):
        with threads(count):
            several = way.poisoned(heads, sequences, starts, lengths)
        assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


@ways
def test_writes_the_new_tokens_and_nothing_else(way: Way) -> None:
    heads = Heads(q=4, kv=2, dim=32)
    sequences = make_sequences(heads, ENDS, page_size=16, dtype=way.dtype)
    starts = way.starts(STARTS, ENDS)
    pools = [filled_pool(heads, sequences, starts) for _ in range(2)]
    way.run(pools[0], sequences, STARTS, ENDS)
    run_step(TorchBackend(pools[1]), sequences, starts, ENDS, page_size=16)
    assert torch.equal(pools[0].buffer, pools[1].buffer)


@ways
def test_large_scores_neither_overflow_nor_lose_the_winner(way: Way) -> None:
    heads = Heads(q=2, kv=1, dim=32)
    sequences = make_sequences(heads, [600], page_size=16, dtype=way.dtype)
    sequences[0].q.mul_(300.0)  # gaps far below where a weight is 0, and maxima that move from block to block
    outs = way.poisoned(heads, sequences, [0], [600])
    # a weight hangs on a score of hundreds, in fp32
    assert worst_error(outs, sequences, way.starts([0], [600]), [600]) < (1e-3 if way.dtype == "float32" else 0.05)


@ways
@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_nan_stays_visible_and_in_its_request(way: Way, side: str) -> None:
    heads = Heads(q=2, kv=1, dim=32)
    sequences = make_sequences(heads, [300, 300], page_size=16, dtype=way.dtype)
    at = 270 if way.kind is not None or side != "q" else 299
    getattr(sequences[0], side)[at, 0, 0] = torch.nan
    poisoned, clean = way.poisoned(heads, sequences, [0, 0], [300, 300])
    assert poisoned[270 if way.kind is not None else 0].isnan().any() and not clean.isnan().any()
    assert way.kind is None or not poisoned[:256].isnan().any()


@ways
def test_heads_of_a_merged_qkv_are_read_in_place(way: Way) -> None:
    heads, ends = Heads(q=4, kv=2, dim=32), [30, 70]
    sequences, starts = make_sequences(heads, ends, page_size=16, dtype=way.dtype), way.starts([0, 0], ends)
    pool = filled_pool(heads, sequences, starts)
    kernel = make_paged_decode(pool) if way.kind is None else kernel_of(way.kind, pool)
    assert kernel is not None
    kernel.begin(make_step(sequences, starts, ends, page_size=16, extend=way.kind is not None))
    spans = list(zip(sequences, starts, ends, strict=True))
    merged = torch.cat([torch.cat([getattr(s, n)[a:b] for s, a, b in spans]).flatten(1) for n in "qkv"], dim=1)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in merged.split([128, 64, 64], dim=1))
    outs = kernel.attend_rotated(1, q, k, v, Softmax(32**-0.5)).split([b - a for _, a, b in spans])
    assert worst_error(list(outs), sequences, starts, ends) < TOLERANCE[way.dtype]


@extends
@pytest.mark.parametrize(
    "cuts", [[0, 300, 600], [0, 1, 2, 17, 600], [0, 256, 512, 600], [0, 31, 287, 599, 600]], ids=str
)
@pytest.mark.parametrize(("kv", "group"), [(2, 2), (1, 3)])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(way: Way, cuts: list[int], kv: int, group: int) -> None:
    """Each chunk is read back by those after it."""
    heads = Heads(q=kv * group, kv=kv, dim=64)
    (sequence,) = make_sequences(heads, [600], page_size=16, dtype=BF16)
    found = []
    for own in (cuts, [0, 600]):
        kernel = way.backend(poisoned_pool(heads, [600], page_size=16, dtype=BF16))
        found.append(torch.cat([run_step(kernel, [sequence], [a], [b], page_size=16)[0] for a, b in pairwise(own)]))
    assert torch.equal(*found)


def test_the_last_token_of_a_prompt_by_itself_has_the_bits_of_the_whole() -> None:
    heads = Heads(q=4, kv=2, dim=64)
    sequences = make_sequences(heads, [300, 200], page_size=16, dtype=BF16)
    pools = [make_pool(heads, num_pages=pages_needed([300, 200], 16), page_size=16, dtype=BF16) for _ in range(2)]
    backends = [CpuBackend(pool) for pool in pools]
    whole = run_step(backends[0], sequences, [0, 0], [300, 200], page_size=16)
    fill(pools[1], sequences, [299, 199])
    step = make_step(sequences, [299, 199], [300, 200], page_size=16, extend=True)
    backends[1].begin(replace(step, riders=[1]))  # the second is the next token of an answer
    rows = [torch.cat([getattr(s, name)[-1:] for s in sequences]) for name in "qkv"]
    out = attend(backends[1], 1, *rows)
    decoded = run_step(backends[1], sequences, [299, 199], [300, 200], page_size=16, extend=False)
    assert torch.equal(out[1:], decoded[1])
    assert torch.equal(out[:1], whole[0][-1:]) or not backends[1].has_prompt_kernel


@pytest.mark.parametrize("dtype", ["float32", BF16])
def test_single_tokens_beside_prompts_are_bitwise_those_of_a_decode_step(dtype: str) -> None:
    heads = Heads(q=4, kv=2, dim=64)
    starts, ends = [0, 76, 40, 299, 0, 199], [50, 77, 90, 300, 1, 200]
    sequences = make_sequences(heads, ends, page_size=16, dtype=dtype)
    pool = filled_pool(heads, sequences, starts)
    mixed = run_step(CpuBackend(pool), sequences, starts, ends, page_size=16)
    assert worst_error(mixed, sequences, starts, ends) < TOLERANCE[dtype]
    single = [i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if b - a == 1]
    chosen = [[of[i] for i in single] for of in (sequences, starts, ends)]
    alone = run_step(CpuBackend(pool), *chosen, page_size=16, extend=False)
    assert all(torch.equal(mixed[i], out) for i, out in zip(single, alone, strict=True))


@extends
def test_a_request_that_is_skipped_is_written_and_does_not_disturb(way: Way) -> None:
    heads = Heads(q=4, kv=2, dim=32)
    starts, ends = [0, 40, 0], [50, 41, 70]
    sequences = make_sequences(heads, ends, page_size=16, dtype=BF16)
    pool = filled_pool(heads, sequences, starts)
    assert way.kind is not None
    kernel = kernel_of(way.kind, pool)
    kernel.begin(make_step(sequences, starts, ends, page_size=16, extend=True), skip=frozenset({1}))
    rows = [torch.cat([getattr(s, n)[a:b] for s, a, b in zip(sequences, starts, ends, strict=True)]) for n in "qkv"]
    outs = kernel.attend_rotated(1, *rows, Softmax(rows[0].shape[2] ** -0.5)).split([50, 1, 70])
    both = [sequences[0], sequences[2]]
    assert worst_error([outs[0], outs[2]], both, [0, 0], [50, 70]) < TOLERANCE[BF16]
    page, offset = sequences[1].pages[40 // 16], 40 % 16
    assert torch.equal(pool.k(1)[page, offset], sequences[1].k[40])
    assert torch.equal(pool.v(1)[page, offset], sequences[1].v[40])


@extends
def test_denormals_are_flushed_inside_and_kept_outside(way: Way) -> None:
    """Scores 90 apart: a weight would be 1e-39, which takes the CPU a hundred times as long, and is none in bf16."""
    heads = Heads(q=2, kv=1, dim=64)
    (sequence,) = make_sequences(heads, [300], page_size=16, dtype=BF16)
    sequence.q.fill_(3.35)
    sequence.k.fill_(-1.7)
    sequence.k[0].fill_(1.7)
    (out,) = way.poisoned(heads, [sequence], [0], [300])
    first = sequence.v[0].expand(300, 2, 64).flatten(1)
    assert torch.equal(out.view_as(first), first)
    tiny = torch.tensor([1e-39])
    assert (tiny * 1.5).item() > 0


@pytest.mark.parametrize(("start", "dtype"), [(19, "float32"), (0, BF16)], ids=["decode", "prompt"])
def test_a_page_id_out_of_range_never_reaches_c(start: int, dtype: str) -> None:
    heads = Heads(q=2, kv=1, dim=16)
    (s,) = make_sequences(heads, [20], page_size=16, dtype=dtype)
    backend = CpuBackend(make_pool(heads, num_pages=2, page_size=16, dtype=dtype))
    s.pages[1] = 3
    with pytest.raises((AssertionError, IndexError)):  # an IndexError: torch's, on a CPU without the kernel
        run_step(backend, [s], [start], [20], page_size=16, extend=start == 0)


def check_torch(has: Callable[[CpuBackend], bool], *, dim: int, dtype: str, start: int) -> None:
    heads = Heads(q=2, kv=1, dim=dim)
    sequences = make_sequences(heads, [50], page_size=16, dtype=dtype)
    backend = CpuBackend(filled_pool(heads, sequences, [start]))
    assert not has(backend)
    outs = run_step(backend, sequences, [start], [50], page_size=16, extend=start == 0)
    assert worst_error(outs, sequences, [start], [50]) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dim", "dtype", "start"), [(24, "float32", 49), (24, BF16, 0), (32, "float32", 0)])
def test_other_head_dims_and_dtypes_fall_back_to_torch(dim: int, dtype: str, start: int) -> None:
    has = CpuBackend.has_kernel if start else CpuBackend.has_prompt_kernel
    check_torch(has.__get__, dim=dim, dtype=dtype, start=start)


@pytest.mark.parametrize(
    "flags", [("-O0",), ("-O0", "-mavx2", "-mfma"), ("-O0", "-march=native", "-mno-avx512bf16")], ids=str
)
def test_builds_for_lesser_cpus(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "flag_sets", lambda kind: [flags])
    for way in DECODES:
        check_equal(way, Heads(q=4, kv=2, dim=48), [], BORDERS, page_size=16)


@pytest.mark.parametrize("how", ["off", "no compiler", "broken compiler"])
def test_without_a_kernel_torch_decodes_and_one_line_says_so(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    if how == "off":
        monkeypatch.setenv(build.DISABLE_VARIABLE, "1")
    elif how == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.INFO, logger="engine.kernels.build"):
        check_torch(CpuBackend.has_kernel.__get__, dim=16, dtype="float32", start=49)
    assert len(caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_reference_itself_on_a_case_done_by_hand() -> None:
    one = torch.ones(2, 1, 1)
    s = Sequence(q=one, k=torch.zeros(2, 1, 1), v=torch.tensor([1.0, 3.0]).view(2, 1, 1), pages=[1])
    assert reference(s, 0, 2).tolist() == [[1.0], [2.0]]
