"""A machine whose cores are shared by steps on a CPU, transfers (which are copies) and HTTP. Pure.

Shares are fair: while more threads run than there are cores, each thread gets cores / threads of one. The end of a piece of
work is fixed when it starts, so work that starts later cannot delay it. Instead the earlier owner owes the time that it
should have lost, and pays with its next piece of work. So no second of a core is used twice, and events keep the order of
the timeline.
"""

from collections.abc import Hashable
from dataclasses import dataclass

KEPT_S = 60.0  # older work overlaps with no new work: the workers' clocks differ by less than a step


@dataclass(frozen=True, slots=True)
class _Occupancy:
    owner: Hashable
    begin_s: float
    end_s: float
    threads: int


class Host:
    """`cores`: None if each worker has a machine of its own."""

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self._occupancies: list[_Occupancy] = []
        self._owed_s: dict[Hashable, float] = {}
        self._latest_s = 0.0

    def finish(self, owner: Hashable, *, at_s: float, work_s: float, threads: int = 1) -> float:
        """Return the end of `work_s` on each of `threads` cores, started at `at_s`. An owner does not slow itself down."""
        if self._cores is None or work_s <= 0:
            return at_s + work_s
        self._forget(at_s)
        others = [one for one in self._occupancies if one.end_s > at_s and one.owner != owner]
        end_s = self._share(others, at_s, work_s + self._owed_s.pop(owner, 0.0), threads)
        self._occupancies.append(_Occupancy(owner, at_s, end_s, threads))
        return end_s

    def _share(self, others: list[_Occupancy], now_s: float, left_s: float, threads: int) -> float:
        """Return the end of `left_s` of work, computed span by span between two changes of the other work."""
        for change_s in [*sorted({t for s in others for t in (s.begin_s, s.end_s) if t > now_s}), float("inf")]:
            there = [one for one in others if one.begin_s <= now_s < one.end_s]
            before = sum(one.threads for one in there)
            rate = self._rate(before + threads)
            span_s = min(change_s - now_s, left_s / rate)
            for one in there:
                lost_s = span_s * (self._rate(before) - rate)
                self._owed_s[one.owner] = self._owed_s.get(one.owner, 0.0) + lost_s
            now_s, left_s = now_s + span_s, left_s - span_s * rate
            if left_s <= 1e-12:
                break
        return now_s

    def _rate(self, threads: int) -> float:
        assert self._cores is not None
        return min(1.0, self._cores / max(1, threads))

    def _forget(self, at_s: float) -> None:
        if at_s > self._latest_s + 1.0:
            self._latest_s = at_s
            self._occupancies = [one for one in self._occupancies if one.end_s > at_s - KEPT_S]
