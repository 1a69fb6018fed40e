"""An executor in virtual time, one step at a time.

Lengths end answers. All tokens are TOKEN, except OTHER at the planned rate of wrong drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.drafts import Guess
from engine.core.plan import ItemResult, Plan, PlanItem, StepResult
from planner.drafter import DrafterTime, plan_seconds
from planner.host import Host, Threads
from planner.step_time import Beside, StepTime

TOKEN, OTHER = 1, 0
CONFIDENCE = 0.7  # of a drafting model; the engine learns its accept rate
_DRAWN, _OTHER, _SILENT = ItemResult(token=TOKEN), ItemResult(token=OTHER), ItemResult(token=None)


def always_right() -> bool:
    return True


@dataclass(slots=True)
class WorkerClock:
    """A worker's time, ahead of the timeline while it waits for the device."""

    now_s: float = 0.0


@dataclass(slots=True, frozen=True)
class TimedLaunch:
    plan: Plan
    end_s: float


class TimedExecutor:
    """A step starts at its launch, after the one before; `collect` waits for its end."""

    def __init__(
        self,
        step_time: StepTime,
        clock: WorkerClock,
        *,
        host: Host,
        threads: Threads,
        beside: Beside,
        drafter: DrafterTime | None = None,
        is_right: Callable[[], bool] = always_right,
    ) -> None:
        """`is_right` decides whether TOKEN is sampled."""
        self._step_time = step_time
        self._drafter = drafter
        self._is_right = is_right
        self._clock = clock
        self._host = host
        self._threads = {
            prompts: threads._replace(beside=slower)
            for prompts, slower in ((True, beside.prefill), (False, beside.decode))
        }
        self._free_s = 0.0
        self.busy_s = 0.0

    def launch(self, plan: Plan) -> TimedLaunch:
        begin_s = max(self._clock.now_s, self._free_s)
        work_s = plan_seconds(plan, self._step_time, self._drafter)
        threads = self._threads[any(item.extend for item in plan.items)]
        self._free_s = self._host.finish(self, at_s=begin_s, work_s=work_s, threads=threads)
        self.busy_s += self._free_s - begin_s
        return TimedLaunch(plan, self._free_s)

    def launch_forward(self, plan: Plan) -> TimedLaunch:
        return self.launch(plan)

    def launch_sampling(self, launched: TimedLaunch) -> None:
        """Do nothing: it is part of a step's time."""

    def collect(self, launched: TimedLaunch) -> StepResult:
        self._clock.now_s = max(self._clock.now_s, launched.end_s)
        plan = launched.plan
        return StepResult(plan.seq, [self._result(item) for item in plan.items])

    def _result(self, item: PlanItem) -> ItemResult:
        if item.to_draft:
            return ItemResult(token=None, drafted=[Guess(TOKEN, n - 1, CONFIDENCE) for n in range(item.to_draft)])
        if not item.sample:
            return _SILENT
        return _DRAWN if self._is_right() else _OTHER
