"""Durations of launched steps: at depth 2 a step starts when the previous one ends.

With pipeline stages it is one stage's time: at most the interval between two ends, and an even part
of launch to end. Either is exact for full, or empty, stages.
"""

from collections import deque
from collections.abc import Callable

from engine.core.lanes import Lane
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.scheduler import Scheduler
from engine.loop.listener import LoopListener


class StepDurations(LoopListener):
    """Reports plan and seconds per collected step, except failed steps and those that waited.

    `stages`: of the pipeline. `lane`: with PD multiplexing.
    """

    def __init__(self, report: Callable[[Plan, float], None], *, stages: int, lane: Lane | None = None) -> None:
        self._report = report
        self._stages = stages
        self._lane = lane
        self._launched: deque[tuple[Plan, float]] = deque()
        self._ended_s = float("-inf")

    def on_launch(self, plan: Plan, now_s: float) -> None:
        if plan.lane is self._lane:
            self._launched.append((plan, now_s))

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        if effects.lane is not self._lane:
            return
        plan, launched_s = self._launched.popleft()
        taken_s = min((now_s - launched_s) / self._stages, now_s - self._ended_s)
        self._ended_s = now_s
        if not effects.failure and _is_own(plan):
            self._report(plan, taken_s)


def durations_of(scheduler: Scheduler) -> list[StepDurations]:
    """Return listeners for the scheduler's parts that learn from step times."""
    budget, drafting, limits = scheduler.step_budget, scheduler.drafting, scheduler.limits
    prompts = Lane.PREFILL if limits.multiplexed else None
    durations = [] if budget is None else [StepDurations(budget.note, stages=limits.pp_size, lane=prompts)]
    return durations if drafting is None else [*durations, StepDurations(drafting.note, stages=1)]


def _is_own(plan: Plan) -> bool:
    """False if another DP attention rank has more tokens, and so determines the time."""
    return plan.agreed is None or sum(item.q_len for item in plan.items) >= max(plan.agreed.tokens)
