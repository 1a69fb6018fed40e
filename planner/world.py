"""The virtual world of plans and of simulated clusters: time, threads and workers."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from engine.assembly.worker import Clock, Computing, VirtualPorts, WorkerWire, assemble_worker
from engine.loop.role import EngineRole
from engine.loop.services import LoopSettings
from engine.messages import ToFrontend


class TimedEvent:
    __slots__ = ("act", "cancelled", "time_s")

    def __init__(self, time_s: float, act: Callable[..., Any]) -> None:
        self.time_s, self.act, self.cancelled = time_s, act, False

    def cancel(self) -> None:
        self.cancelled = True


E = TypeVar("E", bound=TimedEvent)


class Timeline:
    """Events in order of time, then of addition."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Any]] = []
        self._serial = 0

    def at(self, time_s: float, act: Callable[[], None]) -> TimedEvent:
        assert time_s >= self.now_s, "an event lies in the past"
        return self._add(TimedEvent(time_s, act))

    def _add(self, event: E) -> E:
        self._serial += 1
        heapq.heappush(self._queue, (event.time_s, self._serial, event))
        return event

    def step(self) -> None:
        event = heapq.heappop(self._queue)[2]
        self.now_s = event.time_s
        event.act()

    def run_until(self, time_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run events until `done` (True), or up to `time_s` (False)."""
        while not done():
            while self._queue and self._queue[0][2].cancelled:
                heapq.heappop(self._queue)
            if not self._queue or self._queue[0][0] > time_s:
                self.now_s = max(self.now_s, time_s)
                return done()
            self.step()
        return True


class Activity:
    """A thread: `act` again and again, after the pause that it returns, or sooner once woken.

    `at(time, act)` adds an event. `lag_s()`: how long a wake-up takes. Without a pause it sleeps
    until it is woken.
    """

    def __init__(
        self,
        act: Callable[[], float | None],
        *,
        now_s: Callable[[], float],
        at: Callable[[float, Callable[[], None]], TimedEvent],
        lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._act, self._now_s, self._at, self._lag_s = act, now_s, at, lag_s
        self._event: TimedEvent | None = None

    def wake(self) -> None:
        self._within(self._lag_s())

    def _within(self, delay_s: float) -> None:
        due_s = self._now_s() + delay_s
        if self._event is not None:
            if self._event.time_s <= due_s:
                return
            self._event.cancel()
        self._event = self._at(due_s, self._run)

    def _run(self) -> None:
        self._event = None
        pause_s = self._act()
        if pause_s is not None:
            self._within(pause_s)


class VirtualWorker(ABC):
    """A production loop over virtual ports. `wake`: lets it turn."""

    def __init__(
        self,
        computing: Computing,
        role: EngineRole,
        clock: Clock,
        *,
        wake: Callable[[], None],
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.scheduler, self.role = computing.scheduler, role
        self.ports = VirtualPorts(self.on_message, wake)
        self.loop = assemble_worker(
            LoopSettings(eos_ids=eos_ids), WorkerWire(ports=self.ports, role=role), clock, computing
        )

    @abstractmethod
    def on_message(self, message: ToFrontend) -> None: ...
