"""Preemption of running requests for a more urgent one, after SGLang.

Victims go by lowest priority, then latest arrival. Memory about to be freed counts first.
"""

from collections.abc import Callable, Sequence

from engine.core.request import Request
from engine.core.results import Departures
from engine.core.state import SchedulerState

Reserve = Callable[[Sequence[Request]], int]  # pages to keep free for others after these leave
Suffice = Callable[[Sequence[Request]], bool]


class Preemption:
    def __init__(self, state: SchedulerState, departures: Departures) -> None:
        self._stages = state.stages
        self._memory = state.memory
        self._table = state.table
        self._counters = state.counters
        self._departures = departures
        self._priorities = state.limits.priorities

    def make_room(self, request: Request, reserve: Reserve, *, row: bool) -> list[Request]:
        """Retract and return victims, whose steps free memory; none if they do not suffice."""
        victims = self._victims(request, lambda gone: self._suffice(request, gone, reserve, row=row))
        for victim in victims:
            self._retract(victim)
        return victims

    def make_rows(self, late: Sequence[Request]) -> None:
        """Free a lower-priority victim's row for each of `late`."""
        coming = sum(r.slot is not None for r in self._stages.draining)
        for request in late[coming:]:
            victims = [r for r in self._candidates(request) if r.slot is not None]
            if not victims:
                return
            self._retract(victims[0])

    def _retract(self, victim: Request) -> None:
        self._departures.retract(victim)
        victim.stats.preemptions += 1
        self._counters.preemptions += 1

    def _victims(self, request: Request, suffice: Suffice) -> list[Request]:
        candidates = self._candidates(request)
        if not candidates or suffice([]):
            return []
        victims: list[Request] = []
        for candidate in candidates:
            victims.append(candidate)
            if suffice(victims):
                return _only_needed(victims, suffice)
        return []

    def _candidates(self, request: Request) -> list[Request]:
        priorities = self._priorities
        if not priorities.enabled or self._stages.retraction_pending:
            return []
        candidates = [r for r in self._stages.running if priorities.may_preempt(request, r)]
        return sorted(candidates, key=lambda r: (priorities.rank(r), -r.serial))

    def _suffice(self, request: Request, victims: Sequence[Request], reserve: Reserve, *, row: bool) -> bool:
        leaving = [*self._stages.draining, *victims]
        if row and self._table.num_free == 0 and all(r.slot is None for r in leaving):
            return False
        return self._memory.pages_left(request, without=leaving) >= reserve(victims)


def _only_needed(victims: list[Request], suffice: Suffice) -> list[Request]:
    for spared in victims[-2::-1]:  # the last one is needed, or the search would have ended before
        others = [v for v in victims if v is not spared]
        if suffice(others):
            victims = others
    return victims
