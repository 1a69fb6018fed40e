"""A machine whose cores everything shares: steps on a CPU, transfers that are copies, HTTP. Pure.

Fair shares: while more threads run than there are cores, each gets cores / threads of one. Who was told an end before a
later one came would keep its whole core, and the machine would do more than it can: such a one owes what it got too much,
and pays with its next piece of work. So no second of a core is given away twice, and the order of events stays that of the
timeline.
"""

from collections.abc import Hashable
from dataclasses import dataclass

KEPT_S = 60.0  # what ended so long ago meets nobody any more: workers' clocks differ by less than a step


@dataclass(frozen=True, slots=True)
class _Stay:
    who: Hashable
    begin_s: float
    end_s: float
    threads: int


class Host:
    """`cores`: None: everybody has a machine of its own."""

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self._stays: list[_Stay] = []
        self._owed_s: dict[Hashable, float] = {}
        self._latest_s = 0.0

    def finish(self, who: Hashable, *, at_s: float, work_s: float, threads: int = 1) -> float:
        """When `work_s` on each of `threads` cores, begun at `at_s`, is done. A `who` is never slowed down by itself."""
        if self._cores is None or work_s <= 0:
            return at_s + work_s
        self._forget(at_s)
        others = [stay for stay in self._stays if stay.end_s > at_s and stay.who != who]
        end_s = self._share(others, at_s, work_s + self._owed_s.pop(who, 0.0), threads)
        self._stays.append(_Stay(who, at_s, end_s, threads))
        return end_s

    def _share(self, others: list[_Stay], now_s: float, left_s: float, threads: int) -> float:
        """Works `left_s` off, from change to change of who else is there."""
        for change_s in [*sorted({t for s in others for t in (s.begin_s, s.end_s) if t > now_s}), float("inf")]:
            there = [stay for stay in others if stay.begin_s <= now_s < stay.end_s]
            before = sum(stay.threads for stay in there)
            rate = self._rate(before + threads)
            span_s = min(change_s - now_s, left_s / rate)
            for stay in there:
                lost_s = span_s * (self._rate(before) - rate)
                self._owed_s[stay.who] = self._owed_s.get(stay.who, 0.0) + lost_s
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
            self._stays = [stay for stay in self._stays if stay.end_s > at_s - KEPT_S]
