"""Virtual time: a queue of events."""

import heapq
from collections.abc import Callable


class Timeline:
    """Events in order of time, then of addition."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        assert time_s >= self.now_s, "an event lies in the past"
        self._serial += 1
        heapq.heappush(self._queue, (time_s, self._serial, act))

    def run_until(self, time_s: float, *, done: Callable[[], bool]) -> None:
        """Run events up to `time_s`, or until `done`."""
        while self._queue and self._queue[0][0] <= time_s and not done():
            self.now_s, _, act = heapq.heappop(self._queue)
            act()
