"""The C kernel of prompts against float64, in each kind of arithmetic that this CPU has, and what its bits depend on."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kernels.build import Kind
from engine.kernels.paged_attention import EXTEND, PagedExtend, plain_softmax
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
    run_step,
    worst_error,
)
from tests.kernels.test_linear import kinds

BF16 = "bfloat16"
# Around tiles (16), steps (32) and blocks of keys (256); prompts whole, and chunks behind a prefix.
STARTS = [0, 0, 0, 255, 31, 511]
ENDS = [1, 17, 300, 257, 64, 530]


@pytest.fixture(params=kinds(), ids=lambda kind: kind.label)
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


def kernel_of(kind: Kind, pool: KVPool) -> PagedExtend:
    library = EXTEND.load(kind=kind)
    assert library is not None
    return PagedExtend(library, pool)


def extend(
    kind: Kind, heads: Heads, sequences: list[Sequence], starts: list[int], ends: list[int], *, page_size: int = 16
) -> list[torch.Tensor]:
    pool = poisoned_pool(heads, [len(s.q) for s in sequences], page_size=page_size, dtype=BF16)
    fill(pool, sequences, starts)
    return run_step(kernel_of(kind, pool), sequences, starts, ends, page_size=page_size)


def in_chunks(kind: Kind, heads: Heads, sequence: Sequence, cuts: list[int]) -> torch.Tensor:
    """The rows of one prompt that came in chunks [cuts[i], cuts[i + 1]), each read back by those after it."""
    pool = poisoned_pool(heads, [len(sequence.q)], page_size=16, dtype=BF16)
    kernel = kernel_of(kind, pool)
    return torch.cat([run_step(kernel, [sequence], [a], [b], page_size=16)[0] for a, b in pairwise(cuts)])


@pytest.mark.parametrize(
    ("kv", "group", "dim", "page_size"),
    [(2, 2, 128, 16), (2, 1, 64, 1), (1, 3, 96, 64), (3, 5, 16, 8), (1, 7, 48, 16), (1, 9, 80, 16), (1, 2, 256, 16)],
)
def test_any_shape_equals_the_reference(kind: Kind, kv: int, group: int, dim: int, page_size: int) -> None:
    heads = Heads(q=kv * group, kv=kv, dim=dim)
    sequences = make_sequences(heads, ENDS, page_size=page_size, dtype=BF16)
    outs = extend(kind, heads, sequences, STARTS, ENDS, page_size=page_size)
    assert worst_error(outs, sequences, STARTS, ENDS) < TOLERANCE[BF16]


@pytest.mark.parametrize(
    "cuts", [[0, 300, 600], [0, 1, 2, 17, 600], [0, 256, 512, 600], [0, 31, 287, 599, 600]], ids=str
)
@pytest.mark.parametrize(("kv", "group"), [(2, 2), (1, 3)])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(kind: Kind, cuts: list[int], kv: int, group: int) -> None:
    heads = Heads(q=kv * group, kv=kv, dim=64)
    (sequence,) = make_sequences(heads, [600], page_size=16, dtype=BF16)
    assert torch.equal(in_chunks(kind, heads, sequence, cuts), in_chunks(kind, heads, sequence, [0, 600]))


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


def test_batch_mates_and_pages_do_not_change_the_bits(kind: Kind) -> None:
    heads = Heads(q=4, kv=2, dim=64)
    sequences = make_sequences(heads, ENDS, page_size=16, dtype=BF16)
    together = extend(kind, heads, sequences, STARTS, ENDS)
    for s, start, end, out in zip(sequences, STARTS, ENDS, together, strict=True):
        alone = Sequence(q=s.q, k=s.k, v=s.v, pages=list(range(1, len(s.pages) + 1)))
        assert torch.equal(extend(kind, heads, [alone], [start], [end])[0], out)


def test_threads_do_not_change_the_bits(kind: Kind) -> None:
    heads = Heads(q=4, kv=2, dim=64)
    sequences = make_sequences(heads, ENDS, page_size=16, dtype=BF16)
    one = extend(kind, heads, sequences, STARTS, ENDS)
    try:
        torch.set_num_threads(3)
        three = extend(kind, heads, sequences, STARTS, ENDS)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_writes_the_new_tokens_and_nothing_else(kind: Kind) -> None:
    heads = Heads(q=4, kv=2, dim=32)
    sequences = make_sequences(heads, ENDS, page_size=16, dtype=BF16)
    pools = [filled_pool(heads, sequences, STARTS) for _ in range(2)]
    for backend in (kernel_of(kind, pools[0]), TorchBackend(pools[1])):
        run_step(backend, sequences, STARTS, ENDS, page_size=16)
    assert torch.equal(pools[0].buffer, pools[1].buffer)


def test_a_request_that_is_skipped_is_written_and_does_not_disturb(kind: Kind) -> None:
    heads = Heads(q=4, kv=2, dim=32)
    starts, ends = [0, 40, 0], [50, 41, 70]
    sequences = make_sequences(heads, ends, page_size=16, dtype=BF16)
    pool = filled_pool(heads, sequences, starts)
    kernel = kernel_of(kind, pool)
    kernel.begin(make_step(sequences, starts, ends, page_size=16, extend=True), skip=frozenset({1}))
    rows = [torch.cat([getattr(s, n)[a:b] for s, a, b in zip(sequences, starts, ends, strict=True)]) for n in "qkv"]
    outs = kernel.attend_rotated(1, *rows, plain_softmax(rows[0].shape[2])).split([50, 1, 70])
    both = [sequences[0], sequences[2]]
    assert worst_error([outs[0], outs[2]], both, [0, 0], [50, 70]) < TOLERANCE[BF16]
    page, offset = sequences[1].pages[40 // 16], 40 % 16
    assert torch.equal(pool.k(1)[page, offset], sequences[1].k[40])
    assert torch.equal(pool.v(1)[page, offset], sequences[1].v[40])


def test_large_scores_neither_overflow_nor_lose_the_winner(kind: Kind) -> None:
    heads = Heads(q=2, kv=1, dim=32)
    sequences = make_sequences(heads, [600], page_size=16, dtype=BF16)
    sequences[0].q.mul_(300.0)  # gaps far below where a weight is 0, and maxima that move from block to block
    outs = extend(kind, heads, sequences, [0], [600])
    assert worst_error(outs, sequences, [0], [600]) < 0.05  # a weight hangs on a score of hundreds, in fp32


def test_denormals_are_flushed_inside_and_kept_outside(kind: Kind) -> None:
    """Scores 90 apart: a weight would be 1e-39, which takes the CPU a hundred times as long, and is none in bf16."""
    heads = Heads(q=2, kv=1, dim=64)
    (sequence,) = make_sequences(heads, [300], page_size=16, dtype=BF16)
    sequence.q.fill_(3.35)
    sequence.k.fill_(-1.7)
    sequence.k[0].fill_(1.7)
    (out,) = extend(kind, heads, [sequence], [0], [300])
    first = sequence.v[0].expand(300, 2, 64).flatten(1)
    assert torch.equal(out.view_as(first), first)
    tiny = torch.tensor([1e-39])
    assert (tiny * 1.5).item() > 0


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_nan_stays_visible_and_in_its_request(kind: Kind, side: str) -> None:
    heads = Heads(q=2, kv=1, dim=32)
    sequences = make_sequences(heads, [300, 300], page_size=16, dtype=BF16)
    getattr(sequences[0], side)[270, 0, 0] = torch.nan
    poisoned, clean = extend(kind, heads, sequences, [0, 0], [300, 300])
    assert poisoned[270].isnan().any() and not poisoned[:256].isnan().any() and not clean.isnan().any()


def test_heads_of_a_merged_qkv_are_read_in_place(kind: Kind) -> None:
    heads = Heads(q=4, kv=2, dim=32)
    (s,) = make_sequences(heads, [70], page_size=16, dtype=BF16)
    pool = poisoned_pool(heads, [70], page_size=16, dtype=BF16)
    kernel = kernel_of(kind, pool)
    kernel.begin(make_step([s], [0], [70], page_size=16, extend=True))
    merged = torch.cat([x.flatten(1) for x in (s.q, s.k, s.v)], dim=1)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in merged.split([128, 64, 64], dim=1))
    out = kernel.attend_rotated(1, q, k, v, plain_softmax(q.shape[2]))
    assert worst_error([out], [s], [0], [70]) < TOLERANCE[BF16]


def test_what_does_not_fit_never_reaches_c() -> None:
    heads = Heads(q=2, kv=1, dim=16)
    (s,) = make_sequences(heads, [20], page_size=16, dtype=BF16)
    backend = CpuBackend(make_pool(heads, num_pages=2, page_size=16, dtype=BF16))
    s.pages[1] = 3
    with pytest.raises((AssertionError, IndexError)):  # an IndexError: torch's, on a CPU without the kernel
        run_step(backend, [s], [0], [20], page_size=16)


@pytest.mark.parametrize(("dim", "dtype"), [(24, BF16), (32, "float32")])
def test_other_head_dims_and_dtypes_fall_back_to_torch(dim: int, dtype: str) -> None:
    heads = Heads(q=2, kv=1, dim=dim)
    (s,) = make_sequences(heads, [50], page_size=16, dtype=dtype)
    backend = CpuBackend(make_pool(heads, num_pages=4, page_size=16, dtype=dtype))
    assert not backend.has_prompt_kernel
    outs = run_step(backend, [s], [0], [50], page_size=16)
    assert worst_error(outs, [s], [0], [50]) < TOLERANCE[dtype]
