"""When the loop reads its inbox. Under heavy decode a read costs more than it gains (--scheduler-recv-interval)."""

from engine.core.plan import Plan


class ReceiveSkipper:
    """`interval`: pure decode steps between two reads. Any other turn reads."""

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._decodes = 0

    def due(self, last: Plan | None) -> bool:
        """`last`: what the turn before launched, if anything."""
        self._decodes = 0 if last is None or last.extend else self._decodes + 1
        if self._decodes % self._interval == 0:
            self._decodes = 0
            return True
        return False
