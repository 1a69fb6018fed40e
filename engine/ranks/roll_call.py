"""Whether followers take messages: the leader asks now and then, and ends a group in which one does not answer. Pure.

A rank that hangs in a step is the watchdog's. One that hangs while it rests would cost every request that needs it: a decode
worker's leader gets no KV then, and has no step in which it could miss that rank.
"""

ASKS_PER_LIMIT = 4
STEPS_AHEAD = 2.0  # the question waits behind steps, each of which may take as long as the limit


class RollCall:
    """`limit_s`: longest step; 0 or less: ask nothing."""

    def __init__(self, limit_s: float) -> None:
        self.every_s = limit_s / ASKS_PER_LIMIT if limit_s > 0 else None
        self._longest_s = STEPS_AHEAD * limit_s
        self._asked_at_s: float | None = None
        self._waiting = False

    def due(self, now_s: float) -> bool:
        """Whether to ask now; then it counts as asked."""
        if self.every_s is None or self._waiting or now_s - (self._asked_at_s or 0.0) < self.every_s:
            return False
        self._asked_at_s, self._waiting = now_s, True
        return True

    def answered(self) -> None:
        """Note that all have answered."""
        self._waiting = False

    def late_s(self, now_s: float) -> float | None:
        """Return how long an answer has been missing, if too long."""
        if not self._waiting or self._asked_at_s is None or now_s - self._asked_at_s <= self._longest_s:
            return None
        return now_s - self._asked_at_s
