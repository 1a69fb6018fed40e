"""Work dealt to ranks: each piece once, about evenly, and alike wherever it is computed."""

from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from engine.executor.encoder_ranks import deal


def busiest(weights: list[int], owners: list[int] | tuple[int, ...], ranks: int) -> int:
    return max(sum(w for w, owner in zip(weights, owners, strict=True) if owner == rank) for rank in range(ranks))


def test_the_heaviest_goes_first_to_the_rank_that_has_least() -> None:
    assert deal([1, 7, 2, 5, 4], 2) == [0, 0, 0, 1, 1]
    assert deal([], 3) == []


def test_equal_pieces_go_round_in_order() -> None:
    assert deal([4] * 5, 3) == [0, 1, 2, 0, 1]
    assert deal([0, 0], 2) == [0, 0], "a piece of no weight makes no rank busier"


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_each_piece_has_one_rank_and_no_rank_could_spare_its_last_one(weights: list[int], ranks: int) -> None:
    owners = deal(weights, ranks)
    assert len(owners) == len(weights) and set(owners) <= set(range(ranks)) and owners == deal(list(weights), ranks)
    loads = [busiest(weights, [0 if owner == rank else 1 for owner in owners], 1) for rank in range(ranks)]
    for rank, load in enumerate(loads):
        own = [w for w, owner in zip(weights, owners, strict=True) if owner == rank]
        assert load - min(own, default=0) <= min(loads)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
@example([3, 3, 2, 2, 2], 2)  # 7 where 6 would do: the worst of two ranks
def test_the_busiest_rank_is_within_graham_s_bound(weights: list[int], ranks: int) -> None:
    best = min(busiest(weights, way, ranks) for way in product(range(ranks), repeat=len(weights)))
    assert 3 * ranks * busiest(weights, deal(weights, ranks), ranks) <= (4 * ranks - 1) * best
