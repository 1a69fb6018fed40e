"""Sums of ranks: the bits of one binary tree, on every rank, at every place of a batch, in windows, by C and by torch."""

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.allreduce import allreduce
from engine.kernels.build import RanksEnded
from engine.kernels.tape import Tape, Workspace, tape_library
from engine.parallel import collectives
from engine.parallel.collectives import Collectives, SharedMemoryCollectives
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from tests.parallel.ranks_in_threads import opened, run_ranks, together

HAS_C = allreduce() is not None
KINDS = ["c", "torch"] if HAS_C else ["torch"]


@contextlib.contextmanager
def without_c() -> Iterator[None]:
    """Collectives and regions that are made meanwhile compute with torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "allreduce", lambda: None)
        patch.setattr("engine.parallel.region.allreduce", lambda: None)
        yield


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with without_c() if request.param == "torch" else contextlib.nullcontext():
        yield request.param


def partials_of(ranks: int, *shape: int, seed: int = 0) -> list[Tensor]:
    """Numbers of very different sizes: their sum depends on the order."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) * torch.randn(shape, generator=rng).exp() * 3 for _ in range(ranks)]


def one_by_one(partials: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The tree by its definition, apart from the product's: the largest power of two below the count goes left."""

    def add(begin: int, end: int) -> Tensor:
        if end - begin == 1:
            return partials[begin]
        left = 1
        while 2 * left < end - begin:
            left *= 2
        return add(begin, begin + left) + add(begin + left, end)

    return add(0, len(partials)).to(dtype)


def summed(partials: list[Tensor], dtype: torch.dtype, *, window: int = 64) -> list[Tensor]:
    plan = RegionPlan(ranks=len(partials), window=window)
    return run_ranks(plan, lambda c: c.sum(partials[c.rank], dtype=dtype).clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_every_rank_has_the_bits_of_the_tree(kind: str, ranks: int, dtype: torch.dtype) -> None:
    partials = partials_of(ranks, 5, 77)
    expected = one_by_one(partials, dtype)
    for got in summed(partials, dtype):
        assert got.dtype == dtype and torch.equal(got, expected)


@given(
    ranks=st.integers(2, 6),
    rows=st.integers(0, 9),
    columns=st.integers(1, 70),
    window=st.sampled_from([16, 48, 4096]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_shape_in_any_windows(ranks: int, rows: int, columns: int, window: int, seed: int) -> None:
    partials = partials_of(ranks, rows, columns, seed=seed)
    for dtype in (torch.bfloat16, torch.float32):
        expected = one_by_one(partials, dtype)
        assert all(torch.equal(got, expected) for got in summed(partials, dtype, window=window))


@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any),
    padded=st.booleans(),
    columns=st.integers(1, 70),
    window=st.sampled_from([16, 48, 4096]),
    by_c=st.sampled_from(KINDS),
)
@settings(max_examples=60)
def test_each_rank_brings_rows_and_takes_the_sums_of_its_own(
    counts: list[int], padded: bool, columns: int, window: int, by_c: str
) -> None:
    """End to end, or each in an equal part, of which no rank reads the other rows."""
    parts = [max(counts)] * len(counts) if padded else counts
    firsts, total = [sum(parts[:rank]) for rank in range(len(parts))], sum(parts)
    brought = [torch.randn(n, columns).to(torch.bfloat16) for n in counts]
    partials = partials_of(len(counts), total, columns)
    sums = one_by_one(partials, torch.bfloat16)

    def work(rank: SharedMemoryCollectives) -> tuple[Tensor, Tensor]:
        first, count = firsts[rank.rank], counts[rank.rank]
        rows = rank.gather_rows(brought[rank.rank], first=first, total=total)
        own = rank.sum_rows(partials[rank.rank], rows=range(first, first + count), dtype=torch.bfloat16)
        return rows, own

    with without_c() if by_c == "torch" else contextlib.nullcontext():
        answers = run_ranks(RegionPlan(ranks=len(counts), window=window), work)
    for rank, (rows, own) in enumerate(answers):
        assert torch.equal(own, sums[firsts[rank] : firsts[rank] + counts[rank]])
        for first, part in zip(firsts, brought, strict=True):
            assert torch.equal(rows[first : first + len(part)], part)


def test_a_rank_that_adds_while_others_gather_is_out_of_step(kind: str) -> None:
    def work(rank: SharedMemoryCollectives) -> Tensor:
        if rank.rank:
            return rank.sum(torch.zeros(2, 16), dtype=torch.float32)
        return rank.gather_rows(torch.zeros(2, 16), first=0, total=2)

    with pytest.raises(RuntimeError, match="ranks are out of step"):
        run_ranks(RegionPlan(ranks=2), work)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_row_has_the_same_bits_at_every_place_of_a_batch(kind: str, ranks: int) -> None:
    rows = partials_of(ranks, 1, 96)
    expected = one_by_one(rows, torch.bfloat16)
    batches = [row.repeat(11, 1) for row in rows]
    for got in summed(batches, torch.bfloat16, window=64):
        assert torch.equal(got, expected.repeat(11, 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_error_is_one_rounding(kind: str, ranks: int) -> None:
    partials = [p.abs() for p in partials_of(ranks, 16, 64)]  # no cancellation: errors are relative to the sum
    exact = torch.stack(partials).double().sum(0)
    (got, *_) = summed(partials, torch.bfloat16)
    half_a_unit = torch.exp2(torch.floor(torch.log2(exact)) - 8)
    in_float32 = exact * ranks * 2.0**-24
    assert ((got.double() - exact).abs() <= half_a_unit + in_float32).all()


def test_denormals_and_infinities_are_rounded_as_torch_rounds_them(kind: str) -> None:
    partials = [torch.tensor([[1e-39, 2e-45, 3e38, torch.inf, -0.0, 1.00390625, 1.01171875]] * 3) for _ in range(2)]
    expected = one_by_one(partials, torch.bfloat16)
    for got in summed(partials, torch.bfloat16):
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


def test_a_nan_of_one_rank_is_one_on_all(kind: str) -> None:
    partials = partials_of(3, 2, 20)
    partials[1][1, 3] = torch.nan
    for got in summed(partials, torch.bfloat16):
        assert got.isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.skipif(not HAS_C, reason="no compiler")
def test_ranks_with_and_without_a_compiler_meet() -> None:
    partials = partials_of(3, 7, 50)

    def work(rank: Collectives) -> tuple[Tensor, Tensor | None]:
        mine = partials[rank.rank]
        total = rank.sum(mine, dtype=torch.bfloat16)
        first = rank.rank * 50
        return total, rank.gather_columns(mine, columns=range(first, first + 50), total=150)

    with opened(RegionPlan(ranks=3, window=64, logits_rows=7, vocab=150), 2) as regions:
        ranks = [SharedMemoryCollectives(region, rank=rank) for rank, region in zip((0, 2), regions, strict=True)]
        assert regions[0].descriptor is not None
        with without_c():
            region = SharedRegion.open(regions[0].descriptor, regions[0].plan)
            ranks.append(SharedMemoryCollectives(region, rank=1))
        answers = together([partial(work, rank) for rank in ranks], region=region)
    assert all(torch.equal(total, one_by_one(partials, torch.bfloat16)) for total, _ in answers)
    gathered = answers[0][1]
    assert gathered is not None and torch.equal(gathered, torch.cat(partials, 1))


@pytest.mark.skipif(not HAS_C or tape_library() is None, reason="no compiler")
def test_a_tape_repeats_sums_and_gathers() -> None:
    """Four steps of other numbers in the same memory, by three ranks that each play a tape."""
    steps = [partials_of(3, 4, 40, seed=seed) for seed in range(4)]

    def work(rank: Collectives) -> list[tuple[Tensor, Tensor | None]]:
        own, tape = torch.zeros(4, 40), Tape(Workspace(4))
        with tape.recording():
            total = rank.sum(own, dtype=torch.float32)
            whole = rank.gather_columns(total, columns=range(rank.rank * 40, rank.rank * 40 + 40), total=120)
        seen = []
        for partials in steps:
            own.copy_(partials[rank.rank])
            tape.play()
            seen.append((total.clone(), None if whole is None else whole.clone()))
        return seen

    plan = RegionPlan(ranks=3, window=64, logits_rows=4, vocab=120)
    for rank, seen in enumerate(run_ranks(plan, work)):
        for partials, (total, whole) in zip(steps, seen, strict=True):
            expected = one_by_one(partials, torch.float32)
            assert torch.equal(total, expected)
            assert (whole is not None) == (rank == 0)
            assert whole is None or torch.equal(whole, expected.repeat(1, 3))


@pytest.mark.skipif(not HAS_C or tape_library() is None, reason="no compiler")
def test_a_tape_says_that_ranks_have_ended() -> None:
    with opened(RegionPlan(ranks=2), 2) as regions:
        ranks = [SharedMemoryCollectives(region, rank=rank) for rank, region in enumerate(regions)]
        tape = Tape(Workspace(2))

        def record(rank: Collectives) -> None:
            with tape.recording() if rank.rank == 0 else contextlib.nullcontext():
                rank.sum(torch.zeros(2, 16), dtype=torch.bfloat16)

        together([partial(record, rank) for rank in ranks], region=regions[0])
        regions[1].abort()
        with pytest.raises(RanksEnded):
            tape.play()


def test_ranks_that_add_different_sizes_are_out_of_step(kind: str) -> None:
    with pytest.raises(RuntimeError, match="ranks are out of step"):
        summed([torch.zeros(2, 16), torch.zeros(3, 16)], torch.bfloat16)


def test_logits_are_gathered_in_place_until_the_next_gather(kind: str) -> None:
    """Uneven columns; the leader reads each before it asks for the next, while the others are ahead."""
    columns = [range(0, 5), range(5, 7), range(7, 20)]
    steps = [torch.randn(rows, 20, generator=torch.Generator().manual_seed(rows)) for rows in (3, 1, 4, 4, 2)]

    def work(rank: Collectives) -> list[Tensor]:
        seen = []
        for whole in steps:
            mine = columns[rank.rank]
            got = rank.gather_columns(whole[:, mine.start : mine.stop].contiguous(), columns=mine, total=20)
            assert (got is not None) == (rank.rank == 0)
            if got is not None:
                seen.append(got.clone())
        return seen

    leader, *others = run_ranks(RegionPlan(ranks=3, logits_rows=4, vocab=20), work)
    assert others == [[], []]
    assert all(torch.equal(got, whole) for got, whole in zip(leader, steps, strict=True))


@given(
    counts=st.lists(st.integers(0, 6), min_size=2, max_size=5).filter(any),
    columns=st.integers(1, 40),
    window=st.sampled_from([48, 4096]),
    by_c=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_each_rank_takes_the_rows_that_it_asks_for(
    counts: list[int], columns: int, window: int, by_c: str, seed: int
) -> None:
    """In any order and number; a sum before and behind finds its windows."""
    rng = torch.Generator().manual_seed(seed)
    total, firsts = sum(counts), [sum(counts[:rank]) for rank in range(len(counts))]
    brought = [torch.randn((n, columns), generator=rng) for n in counts]
    wanted = [
        torch.randint(0, total, (int(n),), generator=rng) for n in torch.randint(0, 12, (len(counts),), generator=rng)
    ]
    partials = partials_of(len(counts), 3, columns, seed=seed)

    def work(rank: SharedMemoryCollectives) -> tuple[Tensor, Tensor, Tensor]:
        own = rank.rank
        before = rank.sum(partials[own], dtype=torch.float32)
        rows = rank.take_rows(brought[own], first=firsts[own], total=total, wanted=wanted[own])
        return before, rows, rank.sum(partials[own], dtype=torch.float32)

    with without_c() if by_c == "torch" else contextlib.nullcontext():
        answers = run_ranks(RegionPlan(ranks=len(counts), window=window), work)
    whole, expected = torch.cat(brought), one_by_one(partials, torch.float32)
    for own, (before, rows, behind) in enumerate(answers):
        assert torch.equal(rows, whole[wanted[own]])
        assert torch.equal(before, expected) and torch.equal(behind, expected)


@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 70),
    ranks=st.integers(2, 4),
    owner=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    window=st.sampled_from([16, 4096]),
    by_c=st.sampled_from(KINDS),
)
@settings(max_examples=40)
def test_what_one_rank_has_is_on_all(
    rows: int, columns: int, ranks: int, owner: int, dtype: torch.dtype, window: int, by_c: str
) -> None:
    """Bit by bit; a sum behind it is in step."""
    owner %= ranks
    shared, partials = torch.randn(rows, columns).to(dtype), partials_of(ranks, 3, 5)

    def work(rank: SharedMemoryCollectives) -> tuple[Tensor, Tensor]:
        x = shared.clone() if rank.rank == owner else torch.full_like(shared, torch.nan)
        rank.share(x, owner=owner)
        return x, rank.sum(partials[rank.rank], dtype=torch.bfloat16)

    with without_c() if by_c == "torch" else contextlib.nullcontext():
        answers = run_ranks(RegionPlan(ranks=ranks, window=window), work)
    for x, total in answers:
        assert torch.equal(x, shared) and torch.equal(total, one_by_one(partials, torch.bfloat16))
