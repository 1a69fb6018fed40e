"""When the loop reads its inbox. Under heavy decode a read costs more than it gains (--scheduler-recv-interval)."""

from engine.core.plan import Plan


class ReceiveSkipper:
    """`interval`: pure decode steps between two looks; 1: look every turn. Any other turn looks."""

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._decodes = 0

    def due(self, last: Plan | None) -> bool:
        """`last`: what the turn before launched, None when it launched nothing."""
        self._decodes = 0 if last is None or last.extend else self._decodes + 1
        if self._decodes % self._interval == 0:
            self._decodes = 0
            return True
        return False
