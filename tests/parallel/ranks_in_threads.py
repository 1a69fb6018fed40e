"""Ranks as threads of one process, each with its own mapping of the memory."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from engine.kernels.build import RanksEnded
from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan

T = TypeVar("T")


@contextlib.contextmanager
def opened(plan: RegionPlan, count: int) -> Iterator[list[SharedRegion]]:
    """`count` mappings of one memory."""
    with contextlib.closing(SharedRegion.create(plan)) as first:
        assert first.descriptor is not None
        yield [first, *(SharedRegion.open(first.descriptor, plan) for _ in range(count - 1))]


def together(works: Sequence[Callable[[], T]], *, region: SharedRegion) -> list[T]:
    """The results of all, each in its own thread. The first failure ends the ranks' waits and is raised."""

    def run(work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException:
            region.abort()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
    failures = [e for future in futures if (e := future.exception()) is not None]
    for failure in sorted(failures, key=lambda e: isinstance(e, RanksEnded)):
        raise failure
    return [future.result() for future in futures]


def run_ranks(plan: RegionPlan, work: Callable[[SharedMemoryCollectives], T]) -> list[T]:
    """`work` of each rank of one stage."""
    with opened(plan, plan.ranks) as regions:
        ranks = [SharedMemoryCollectives(region, rank=rank) for rank, region in enumerate(regions)]
        return together([partial(work, rank) for rank in ranks], region=regions[0])
