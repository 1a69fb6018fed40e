"""The smallest cluster for a rate, and what more GPUs give."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.cluster import ClusterLayout
from planner.goodput import Grid, Point, Search
from planner.run import Outcome, RunPool, outcome_of, search_all
from planner.study import Study

MORE_SIZES = 2  # beyond the smallest


@dataclass(frozen=True, slots=True, eq=False)
class SizeResult:
    """The best layout of a size. `point`: at the wanted rate. `outcome`: its highest good rate,
    searched only if the point is good.
    """

    layout: ClusterLayout
    point: Point
    outcome: Outcome

    @property
    def max_per_s(self) -> float:
        """0 if there is none."""
        return self.outcome.rate * self.layout.num_gpus


@dataclass(slots=True, kw_only=True)
class VerifiedSearch(Search):
    """A search up to the `highest` rate at which a run is long enough."""

    highest: float

    def next_rate(self) -> float | None:
        rate, best = Search.next_rate(self), self.best
        if rate is None or (best is not None and best.rate >= self.highest):
            return None
        return min(rate, self.highest)


def find_smallest(study: Study, rate: float) -> list[SizeResult]:
    """`rate`: per second. The first size that keeps the limits is followed by `MORE_SIZES` more.
    Returns all tried sizes.
    """
    found: list[SizeResult] = []
    with RunPool(study.config, jobs=study.config.jobs) as pool:
        for layouts in sizes(study.layouts):
            found.append(_best_of(pool, study, layouts, rate))
            if sum(_is_good(one.point, study) for one in found) > MORE_SIZES:
                break
        return [_with_highest(pool, study, one) for one in found]


def sizes(layouts: Sequence[ClusterLayout]) -> list[list[ClusterLayout]]:
    """Fewest GPUs first."""
    groups = defaultdict[int, list[ClusterLayout]](list)
    for layout in layouts:
        groups[layout.num_gpus].append(layout)
    return [groups[size] for size in sorted(groups)]


def smallest(found: Sequence[SizeResult], study: Study) -> SizeResult | None:
    return next((one for one in found if _is_good(one.point, study)), None)


def better(points: Mapping[ClusterLayout, Point]) -> ClusterLayout:
    """The most good requests, then the shortest TTFT, then TPOT."""

    def key(layout: ClusterLayout) -> tuple[float, float, float]:
        point = points[layout]
        never = float("inf")
        ttft_s = never if point.ttft_s is None else point.ttft_s
        return -point.good_share, ttft_s, never if point.tpot_s is None else point.tpot_s

    return min(points, key=key)


def _best_of(pool: RunPool, study: Study, layouts: Sequence[ClusterLayout], rate: float) -> SizeResult:
    grids = {one: Grid(rates=[rate / one.num_gpus], share=study.slo.share) for one in layouts}
    search_all(pool, grids)
    best = better({layout: grid.points[0] for layout, grid in grids.items()})
    return SizeResult(best, grids[best].points[0], outcome_of(best, grids[best]))


def _with_highest(pool: RunPool, study: Study, one: SizeResult) -> SizeResult:
    if not _is_good(one.point, study):
        return one
    highest = study.max_verified_per_s / one.layout.num_gpus
    search = VerifiedSearch(guess=one.point.rate, share=study.slo.share, points=[one.point], highest=highest)
    search_all(pool, {one.layout: search})
    return SizeResult(one.layout, one.point, outcome_of(one.layout, search))


def _is_good(point: Point, study: Study) -> bool:
    return point.good_share >= study.slo.share
