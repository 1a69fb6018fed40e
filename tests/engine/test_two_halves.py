"""Turns of two halves over real shared memory: what they exchange stays apart, and no wait outlives the ranks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine.executor.two_halves import TwoHalves
from engine.kernels.failures import RanksEnded
from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.exchange import RankExchange, Stages, given
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan

JOIN_S = 20.0
Ranks = list[SharedMemoryCollectives]


@contextmanager
def two_ranks() -> Iterator[tuple[SharedRegion, Ranks]]:
    region = SharedRegion.create(RegionPlan(ranks=2, window=64, beside=True))
    try:
        yield region, [SharedMemoryCollectives(region, rank=rank) for rank in range(2)]
    finally:
        region.close()


def sums(ranks: SharedMemoryCollectives, rows: int, *, times: int) -> Stages[SharedMemoryCollectives, list[float]]:
    """Of rows of ones, `times` times; each rank's are those of its number and one."""
    found = []
    for _ in range(times):
        own = torch.full((rows, 16), 1.0 + ranks.rank)

        def added(way: SharedMemoryCollectives, own: Tensor = own) -> Tensor:
            return way.sum(own, dtype=torch.float32)

        total = given((yield RankExchange(ranks, added)))
        assert total.shape == (rows, 16)
        found.append(float(total.mean()))
    return found


def run(ranks: SharedMemoryCollectives, found: list[list[list[float]]]) -> None:
    two = TwoHalves()
    try:
        found.append(two.run([sums(ranks, 3, times=40), sums(ranks, 7, times=40)]))
    finally:
        two.close()


def test_each_half_gets_its_own_answers_whichever_is_late() -> None:
    found: list[list[list[float]]] = []
    with two_ranks() as (_, ranks):
        threads = [threading.Thread(target=run, args=(one, found)) for one in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
    assert found == [[[3.0] * 40] * 2] * 2


def test_a_rank_that_waits_for_one_that_ended_ends() -> None:
    """The other never comes."""
    with two_ranks() as (region, ranks):
        ends = threading.Timer(0.1, region.abort)
        ends.start()
        with pytest.raises(RanksEnded):
            run(ranks[0], [])
        ends.join()


def test_halves_of_unequal_stages_are_an_error() -> None:
    two = TwoHalves()
    with pytest.raises(AssertionError, match="halves of unequal stages"):
        two.run([_nothing(1), _nothing(3)])
    two.close()


def _nothing(times: int) -> Stages[SharedMemoryCollectives, None]:
    for _ in range(times):
        yield None
