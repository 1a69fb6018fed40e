"""How long launched steps take, one behind the other. Pure: told of launches, collects and the time.

At depth 2 a step begins when the one before it has ended, not when it was launched.
"""

from collections import deque

from engine.core.plan import Plan


class StepDurations:
    def __init__(self) -> None:
        self._launched: deque[tuple[Plan, float]] = deque()
        self._ended_s = float("-inf")

    def launched(self, plan: Plan, now_s: float) -> None:
        self._launched.append((plan, now_s))

    def collected(self, now_s: float) -> tuple[Plan, float]:
        """The oldest launched step has ended: (its plan, seconds)."""
        plan, launched_s = self._launched.popleft()
        taken_s = now_s - max(launched_s, self._ended_s)
        self._ended_s = now_s
        return plan, taken_s
