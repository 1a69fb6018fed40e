"""Whether a worker is silent while it is probed. Owns one timer for each open probe.

A process that is frozen, or behind a cut cable, refuses no connection: it is only silent. A failed check takes seconds to
be sure of; silence is noticed sooner and means less: new requests go elsewhere, where there is anywhere else, and the first
answer ends it. Bytes of any answer that runs there are signs of life too, so a worker that streams is never called silent.
"""

import asyncio
from collections.abc import Callable

ROUNDING_S = 0.001  # timers are no more exact than this


class ProbeTimeout:
    """A probe that was just sent. `close()` must be called, whatever its result.

    `received_s()`: when anything came last (the loop's time). `report(silent)` is called after `limit_s` of silence, and again
    and again until the probe is closed.
    """

    __slots__ = ("_asked_s", "_limit_s", "_loop", "_received_s", "_report", "_timer")

    def __init__(self, *, limit_s: float, received_s: Callable[[], float], report: Callable[[bool], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked_s = self._loop.time()
        self._limit_s = limit_s
        self._received_s = received_s
        self._report = report
        self._timer = self._loop.call_later(limit_s, self._on_timer)

    def close(self) -> None:
        self._timer.cancel()

    def _on_timer(self) -> None:
        quiet_s = quiet_for(asked_s=self._asked_s, received_s=self._received_s(), now_s=self._loop.time())
        silent = quiet_s >= self._limit_s - ROUNDING_S  # or the rest would be too short for any clock to pass
        self._report(silent)
        self._timer = self._loop.call_later(self._limit_s - (0.0 if silent else quiet_s), self._on_timer)


def quiet_for(*, asked_s: float, received_s: float, now_s: float) -> float:
    """Seconds in which nothing came although something should have."""
    return now_s - max(asked_s, received_s)
