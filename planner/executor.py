"""The executor as a stopwatch: a step takes what the cost model says, on a device that computes one step at a time.

It stands where engine/executor/executor.py stands. Tokens are all the same: lengths decide when answers end.
"""

from dataclasses import dataclass

from engine.core.plan import ItemResult, Plan, StepResult
from planner.host import Host
from planner.step_time import StepTime, load_of

TOKEN = 1
_DRAWN, _SILENT = ItemResult(token=TOKEN), ItemResult(token=None)


@dataclass(slots=True)
class WorkerClock:
    """The time at one worker. It runs ahead of the timeline while a turn waits for its device."""

    now_s: float = 0.0


@dataclass(slots=True, frozen=True)
class TimedLaunch:
    """A step that will have been computed at `end_s`."""

    plan: Plan
    end_s: float


class TimedExecutor:
    """A step begins when it is launched and the one before it has ended; to collect it is to wait for its end."""

    def __init__(self, step_time: StepTime, clock: WorkerClock, *, host: Host, threads: int) -> None:
        """`threads`: cores of `host` that a step takes."""
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
