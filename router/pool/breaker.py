"""A circuit breaker, with SGLang's flags and defaults. Pure.

    CLOSED     --cb-failure-threshold faults in a row within the window open it
    OPEN       no requests until the timeout
    HALF_OPEN  up to --cb-success-threshold requests at a time; as many started answers close it,
               one fault opens it again

Only the worker's faults count (`CallFailed.is_fault`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from router.config import BreakerFlags


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    BEGUN = "begun"  # an answer started: it may still break
    WELL = "well"  # an answer is complete
    FAULT = "fault"
    WAITED = "waited"  # the timeout is over


# (state, event) -> (next state, the threshold flag if any)
TRANSITIONS: dict[tuple[State, Event], tuple[State, str]] = {
    (State.CLOSED, Event.BEGUN): (State.CLOSED, ""),
    (State.CLOSED, Event.WELL): (State.CLOSED, ""),
    (State.CLOSED, Event.FAULT): (State.OPEN, "cb_failure_threshold"),
    (State.CLOSED, Event.WAITED): (State.CLOSED, ""),
    (State.OPEN, Event.BEGUN): (State.OPEN, ""),  # of an earlier request
    (State.OPEN, Event.WELL): (State.OPEN, ""),
    (State.OPEN, Event.FAULT): (State.OPEN, ""),
    (State.OPEN, Event.WAITED): (State.HALF_OPEN, ""),
    (State.HALF_OPEN, Event.BEGUN): (State.CLOSED, "cb_success_threshold"),
    (State.HALF_OPEN, Event.WELL): (State.HALF_OPEN, ""),  # already counted as started
    (State.HALF_OPEN, Event.FAULT): (State.OPEN, ""),
    (State.HALF_OPEN, Event.WAITED): (State.HALF_OPEN, ""),
}


@dataclass(slots=True)
class Circuit:
    """After `send` returns True `end_trial` must follow. `quiet`: closed, without faults."""

    flags: BreakerFlags = field(default_factory=BreakerFlags)
    state: State = State.CLOSED
    quiet: bool = True
    on_open: Callable[[float], None] = lambda until_s: None  # receives the end of the timeout, 0.0 if not open
    _since_s: float = -math.inf  # start of this state
    _faults_s: list[float] = field(default_factory=list)  # in a row, within the window
    _num_begun: int = 0  # while half open
    _num_trials: int = 0  # running ones

    def takes(self, now_s: float) -> bool:
        if self.state is State.CLOSED:
            return True
        may_be_tried = self.state is State.HALF_OPEN or self._has_waited(now_s)
        return may_be_tried and self._num_trials < self.flags.cb_success_threshold

    def send(self, now_s: float) -> bool:
        """Return whether it is a trial."""
        if self._has_waited(now_s):
            self.record(Event.WAITED, now_s)
        trial = self.state is State.HALF_OPEN
        if trial:
            self._num_trials += 1
        return trial

    def end_trial(self) -> None:
        self._num_trials -= 1
        assert self._num_trials >= 0

    def _has_waited(self, now_s: float) -> bool:
        return self.state is State.OPEN and now_s - self._since_s >= self.flags.cb_timeout_duration_s

    def record(self, event: Event, now_s: float) -> None:
        if self.flags.disable_circuit_breaker:
            return
        target, needed = TRANSITIONS[self.state, event]
        count = self._count(event, now_s)
        if target is not self.state and not (needed and count < getattr(self.flags, needed)):
            self._enter(target, now_s)
        self.quiet = self.state is State.CLOSED and not self._faults_s

    def _enter(self, target: State, now_s: float) -> None:
        self.state, self._since_s, self._num_begun = target, now_s, 0
        self._faults_s.clear()
        self.on_open(now_s + self.flags.cb_timeout_duration_s if target is State.OPEN else 0.0)

    def reset(self) -> None:
        self._enter(State.CLOSED, -math.inf)
        self.quiet = True

    def _count(self, event: Event, now_s: float) -> int:
        if event is Event.BEGUN:
            self._num_begun += 1
            return self._num_begun
        if event is Event.WELL:
            self._faults_s.clear()
        if event is Event.FAULT:
            oldest_s = now_s - self.flags.cb_window_duration_s
            self._faults_s = [at_s for at_s in self._faults_s if at_s > oldest_s] + [now_s]
        return len(self._faults_s)


# ---- Health of a worker: states and check results. Pure.


class Health(StrEnum):
    STARTING = "starting"  # has not answered a check yet
    UP = "up"
    DRAINING = "draining"  # finishes its requests, takes no new ones
    DOWN = "down"


class Check(StrEnum):
    OK = "ok"
    DRAINING = "draining"  # as the worker reports
    FAILED = "failed"
    REFUSED = "refused"  # nothing listens: decides at once


# (state, event) -> (next state, flag with the number of equal results needed, if any)
HEALTH_TRANSITIONS: dict[tuple[Health, Check], tuple[Health, str]] = {
    (Health.STARTING, Check.OK): (Health.UP, "health_success_threshold"),
    (Health.STARTING, Check.DRAINING): (Health.DRAINING, ""),
    (Health.STARTING, Check.FAILED): (Health.STARTING, ""),
    (Health.STARTING, Check.REFUSED): (Health.STARTING, ""),
    (Health.UP, Check.OK): (Health.UP, ""),
    (Health.UP, Check.DRAINING): (Health.DRAINING, ""),
    (Health.UP, Check.FAILED): (Health.DOWN, "health_failure_threshold"),
    (Health.UP, Check.REFUSED): (Health.DOWN, ""),
    (Health.DRAINING, Check.OK): (Health.UP, "health_success_threshold"),  # a new process serves at this address
    (Health.DRAINING, Check.DRAINING): (Health.DRAINING, ""),
    (Health.DRAINING, Check.FAILED): (Health.DOWN, "health_failure_threshold"),
    (Health.DRAINING, Check.REFUSED): (Health.DOWN, ""),
    (Health.DOWN, Check.OK): (Health.UP, "health_success_threshold"),
    (Health.DOWN, Check.DRAINING): (Health.DRAINING, ""),
    (Health.DOWN, Check.FAILED): (Health.DOWN, ""),
    (Health.DOWN, Check.REFUSED): (Health.DOWN, ""),
}
