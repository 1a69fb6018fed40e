"""Liveness probe of followers: a group ends if one does not answer. Pure.

The watchdog finds ranks that hang in a step; an idle decode worker would not miss one otherwise.
"""

ASKS_PER_LIMIT = 4
STEPS_AHEAD = 2.0  # it queues after steps, each up to the limit


class RollCall:
    """Timer; `limit_s`: longest step, 0 or less disables."""

    def __init__(self, limit_s: float) -> None:
        self.every_s = limit_s / ASKS_PER_LIMIT if limit_s > 0 else None
        self._longest_s = STEPS_AHEAD * limit_s
        self._asked_at_s: float | None = None
        self._waiting = False

    def due(self, now_s: float) -> bool:
        """Return True, and count one, if a probe is due."""
        if self.every_s is None or self._waiting or now_s - (self._asked_at_s or 0.0) < self.every_s:
            return False
        self._asked_at_s, self._waiting = now_s, True
        return True

    def answered(self) -> None:
        self._waiting = False

    def late_s(self, now_s: float) -> float | None:
        """Age of an overdue answer."""
        if not self._waiting or self._asked_at_s is None or now_s - self._asked_at_s <= self._longest_s:
            return None
        return now_s - self._asked_at_s
