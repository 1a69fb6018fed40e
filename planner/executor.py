"""An executor in virtual time: a step takes the time of the cost model, on a device that runs one step at a time.

It replaces engine/executor/executor.py. All tokens are equal: lengths decide when answers end.
"""

from dataclasses import dataclass

from engine.core.plan import ItemResult, Plan, StepResult
from planner.host import Host
from planner.step_time import StepTime, load_of

TOKEN = 1
_DRAWN, _SILENT = ItemResult(token=TOKEN), ItemResult(token=None)


@dataclass(slots=True)
class WorkerClock:
    """A worker's time. It runs ahead of the timeline while a turn waits for the device."""

    now_s: float = 0.0


@dataclass(slots=True, frozen=True)
class TimedLaunch:
    plan: Plan
    end_s: float


class TimedExecutor:
    """A step starts when it is launched and its predecessor has ended; `collect` waits for its end."""

    def __init__(self, step_time: StepTime, clock: WorkerClock, *, host: Host, threads: int) -> None:
        """`threads`: cores of `host` that a step uses."""
        self._step_time = step_time
        self._clock = clock
        self._host = host
        self._threads = threads
        self._free_s = 0.0
        self.busy_s = 0.0

    def launch(self, plan: Plan) -> TimedLaunch:
        begin_s = max(self._clock.now_s, self._free_s)
        work_s = self._step_time.seconds(load_of(plan))
        self._free_s = self._host.finish(self, at_s=begin_s, work_s=work_s, threads=self._threads)
        self.busy_s += self._free_s - begin_s
        return TimedLaunch(plan, self._free_s)

    def launch_forward(self, plan: Plan) -> TimedLaunch:
        return self.launch(plan)

    def launch_sampling(self, launched: TimedLaunch) -> None:
        """The time of sampling is part of the step's: no grammar is planned with."""

    def collect(self, launched: TimedLaunch) -> StepResult:
        self._clock.now_s = max(self._clock.now_s, launched.end_s)
        plan = launched.plan
        return StepResult(plan.seq, [_DRAWN if item.sample else _SILENT for item in plan.items])
