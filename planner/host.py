"""A machine whose cores steps, transfers (copies) and HTTP share. Pure.

Max-min fair, with workers perhaps bound to own cores. The end of work is fixed at its start: later
work cannot delay it, but the owner's next work pays the lost time. So no core is used twice, and
events keep their order.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

KEPT_S = 60.0  # older work overlaps no new work, as clocks differ by less than a step


class Threads(NamedTuple):
    """Threads of one owner, perhaps bound to the cores of worker `home`. `beside`: slowdown while
    all other cores compute, by shared memory and caches.
    """

    num: int = 1
    home: Hashable = None
    beside: float = 0.0


ONE = Threads()


@dataclass(frozen=True, slots=True)
class _Occupancy:
    owner: Hashable
    begin_s: float
    end_s: float
    threads: Threads


class Host:
    """Cores of one machine; `cores` is None if workers have own machines. `home_cores`: bound to
    each.
    """

    def __init__(self, cores: float | None, *, home_cores: float | None = None) -> None:
        self._cores = cores
        self._home_cores = home_cores
        self._occupancies: list[_Occupancy] = []
        self._owed_s: dict[Hashable, float] = {}
        self._latest_s = 0.0

    def home(self, worker: Hashable) -> Hashable:
        return None if self._home_cores is None else worker

    def finish(self, owner: Hashable, *, at_s: float, work_s: float, threads: Threads = ONE) -> float:
        """Return the end of `work_s` on each thread, not slowed by its owner."""
        if self._cores is None or work_s <= 0:
            return at_s + work_s
        self._forget(at_s)
        others = [one for one in self._occupancies if one.end_s > at_s and one.owner != owner]
        end_s = self._share(others, at_s, work_s + self._owed_s.pop(owner, 0.0), threads)
        self._occupancies.append(_Occupancy(owner, at_s, end_s, threads))
        return end_s

    def _share(self, others: list[_Occupancy], now_s: float, left_s: float, threads: Threads) -> float:
        """Return the end of work, in spans between changes of other work."""
        for change_s in [*sorted({t for s in others for t in (s.begin_s, s.end_s) if t > now_s}), float("inf")]:
            there = [one for one in others if one.begin_s <= now_s < one.end_s]
            before = self._speeds([one.threads for one in there])
            *after, rate = self._speeds([*(one.threads for one in there), threads])
            span_s = min(change_s - now_s, left_s / rate)
            for one, was, now in zip(there, before, after, strict=True):
                self._owed_s[one.owner] = self._owed_s.get(one.owner, 0.0) + span_s * (was - now)
            now_s, left_s = now_s + span_s, left_s - span_s * rate
            if left_s <= 1e-12:
                break
        return now_s

    def _speeds(self, running: list[Threads]) -> list[float]:
        """Return thread speeds relative to an idle machine."""
        assert self._cores is not None
        shares = core_shares(self._cores, self._home_cores, running)
        used = sum(one.num * share for one, share in zip(running, shares, strict=True))
        return [
            share / (1 + one.beside * (used - one.num * share) / max(1.0, self._cores - one.num))
            for one, share in zip(running, shares, strict=True)
        ]

    def _forget(self, at_s: float) -> None:
        if at_s > self._latest_s + 1.0:
            self._latest_s = at_s
            self._occupancies = [one for one in self._occupancies if one.end_s > at_s - KEPT_S]


def core_shares(cores: float, home_cores: float | None, running: Iterable[Threads]) -> list[float]:
    """Return cores per thread, max-min fair."""
    running = list(running)
    bound = Counter[Hashable]()
    for one in running:
        if one.home is not None:
            bound[one.home] += one.num
    level, crowded = _water_level(cores, home_cores, bound, sum(one.num for one in running))
    return [crowded.get(one.home, level) if one.home is not None else level for one in running]


def _water_level(
    cores: float, home_cores: float | None, bound: Mapping[Hashable, int], threads: int
) -> tuple[float, dict[Hashable, float]]:
    """Return the share outside of crowded homes, and in each."""
    crowded = dict[Hashable, float]()
    for home, count in sorted(bound.items(), key=lambda item: -item[1]):
        assert home_cores is not None, "nothing is bound"
        if home_cores / count >= min(1.0, cores / max(1, threads)):
            break
        crowded[home] = home_cores / count
        cores, threads = cores - home_cores, threads - count
    return min(1.0, cores / max(1, threads)) if threads else 1.0, crowded
