"""How long launched steps take: at depth 2 a step begins when the one before it has ended.

With pipeline stages it is the time of a stage, which is what the next step waits for: at most what passes between two ends, and
at most an even part of the time from launch to end. Either is exact where the stages are full, or empty.
"""

from collections import deque
from collections.abc import Callable

from engine.core.lanes import Lane
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.scheduler import Scheduler
from engine.loop.listener import LoopListener


class StepDurations(LoopListener):
    """`report` receives the plan and the seconds of each collected step, but for those that failed or waited for others. `stages`: of the pipeline.

    `lane`: with PD multiplexing, whose steps they are.
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
    """Return what reports to the parts of `scheduler` that learn from the time of a step."""
    budget, drafting, limits = scheduler.step_budget, scheduler.drafting, scheduler.limits
    prompts = Lane.PREFILL if limits.multiplexed else None
    durations = [] if budget is None else [StepDurations(budget.note, stages=limits.pp_size, lane=prompts)]
    return durations if drafting is None else [*durations, StepDurations(drafting.note, stages=1)]


def _is_own(plan: Plan) -> bool:
    """Whether no other rank of DP attention has more tokens in the step: its time says nothing of this one's, else."""
    return plan.agreed is None or sum(item.q_len for item in plan.items) >= max(plan.agreed.tokens)
