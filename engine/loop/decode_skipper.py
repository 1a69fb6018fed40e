"""What a turn may skip while it only decodes: to read the inbox, to ask the role. Under heavy decode it costs more than it gains.

Flags: --scheduler-recv-interval, --disaggregation-decode-polling-interval.
"""

from engine.core.plan import Plan


class DecodeSkipper:
    """`interval`: pure decode steps from one time to the next. It is due in any other turn."""

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._decodes = 0

    def due(self, last: Plan | None) -> bool:
        """`last`: what the turn before launched, if anything. Call it once a turn."""
        self._decodes = 0 if last is None or last.extend else self._decodes + 1
        if self._decodes % self._interval == 0:
            self._decodes = 0
            return True
        return False
