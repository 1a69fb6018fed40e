"""How long launched steps take: at depth 2 a step begins when the one before it has ended."""

from collections import deque
from collections.abc import Callable

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.loop.listener import LoopListener


class StepDurations(LoopListener):
    """`report` receives the plan and the seconds of each collected step, but for those that failed."""

    def __init__(self, report: Callable[[Plan, float], None]) -> None:
        self._report = report
        self._launched: deque[tuple[Plan, float]] = deque()
        self._ended_s = float("-inf")

    def on_launch(self, plan: Plan, now_s: float) -> None:
        self._launched.append((plan, now_s))

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        plan, launched_s = self._launched.popleft()
        taken_s = now_s - max(launched_s, self._ended_s)
        self._ended_s = now_s
        if not effects.failure:
            self._report(plan, taken_s)
