"""Times at which steps are launched, sampled and collected.

depth 1                    launch N -> collect N -> launch N+1
depth 2                    launch N -> launch N+1 -> collect N
deferred sampling          launch N -> forward N+1 -> collect N -> masks N+1 -> sample N+1

The loop waits in `collect` for the oldest step. If ends can be watched, each wakes it instead, to
collect ended steps and launch the next.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from engine.core.outputs import StepEffects
from engine.core.plan import Plan, StepResult
from engine.core.scheduler import Scheduler
from engine.messages import TokenOutput

OnStep = Callable[[StepEffects], list[TokenOutput]]


class Launched(Protocol):
    @property
    def plan(self) -> Plan: ...


L = TypeVar("L", bound=Launched)


class StepLauncher(Protocol[L]):
    """The executor (engine/executor/executor.py)."""

    def launch(self, plan: Plan) -> L: ...

    def launch_forward(self, plan: Plan) -> L: ...

    def launch_sampling(self, launched: L) -> None: ...

    def collect(self, launched: L) -> StepResult: ...


class StepStrategy:
    """Plans steps and times launches; subclasses handle several streams or schedulers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def next_plan(self, now_s: float, full: Sequence[bool], *, paused: bool) -> Plan | None:
        return None if paused or full[0] else self.scheduler.schedule(now_s)

    def may_launch(self, plan: Plan) -> bool:
        return True

    def collect(self, plan: Plan, result: StepResult) -> StepEffects:
        return self.scheduler.collect(plan, result)

    def since_s(self, now_s: float) -> float:
        """Return since when a busy stream stands still, for the watchdog; now if none does."""
        return now_s


@dataclass(eq=False)
class StepStream(Generic[L]):
    """Steps of one stream in plan order; arguments as in Pipeline."""

    strategy: StepStrategy
    executor: StepLauncher[L]
    depth: int
    ended: Callable[[L], bool] | None
    on_step: OnStep
    _planned: deque[Plan] = field(default_factory=deque, init=False)  # not launched yet
    _launched: deque[L] = field(default_factory=deque, init=False)
    _unsampled: L | None = field(
        default=None, init=False
    )  # the last one launched, where its masks follow from tokens in flight
    _num_joined: int = field(default=0, init=False)  # of both: only other ranks have something for them
    worked: bool = field(default=False, init=False)

    @property
    def num_launched(self) -> int:
        return len(self._planned) + len(self._launched) - self._num_joined

    @property
    def last(self) -> Plan | None:
        if self._planned:
            return self._planned[-1]
        return self._launched[-1].plan if self._launched else None

    @property
    def full(self) -> bool:
        return len(self._planned) + len(self._launched) >= self.depth

    def advance(self, plan: Plan | None) -> list[TokenOutput]:
        """Launch `plan` after those before it; collect due steps. `worked`: any of it."""
        self.worked = plan is not None
        if plan is not None:
            self._planned.append(plan)
            self._num_joined += plan.joins
        self._launch()
        outputs = self._collect(self._left(plan))
        if self._planned:
            self._launch()  # what waited for the end of another
        return outputs

    def _launch(self) -> None:
        while self._planned and self._unsampled is None:
            plan = self._planned[0]
            if not self.strategy.may_launch(plan):
                return
            self._planned.popleft()
            self.worked = True
            if plan.sample_deferred and self._launched:  # else the tokens for its masks are there
                self._unsampled = self.executor.launch_forward(plan)
                self._launched.append(self._unsampled)
            else:
                self.strategy.scheduler.fill_masks(plan)
                self._launched.append(self.executor.launch(plan))

    def _left(self, plan: Plan | None) -> int:
        """Steps to keep in flight: depth - 1, unless others wait for their tokens or ends."""
        if self.ended is not None or self._planned or self._unsampled is not None:
            return 0
        return max(0, len(self._launched) - 1) if plan is None else self.depth - 1

    def _collect(self, left: int) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        ended = self.ended
        while len(self._launched) > left:
            launched = self._launched[0]
            if launched is self._unsampled or (ended is not None and not ended(launched)):
                break
            self._launched.popleft()
            self._num_joined -= launched.plan.joins
            self.worked = True
            outputs += self.on_step(self.strategy.collect(launched.plan, self.executor.collect(launched)))
        if self._unsampled is not None and self._unsampled is self._launched[0]:
            self.strategy.scheduler.fill_masks(self._unsampled.plan)
            self.executor.launch_sampling(self._unsampled)
            self._unsampled = None
        return outputs


class Pipeline(Generic[L]):
    """`depth`: steps per stream before the oldest is collected.

    `ended`: checks that `collect` returns at once; then each end wakes the loop.
    """

    def __init__(
        self,
        on_step: OnStep,
        *,
        strategy: StepStrategy,
        executor: StepLauncher[L],
        depth: int,
        ended: Callable[[L], bool] | None = None,
        streams: int = 1,
    ) -> None:
        assert depth >= 1
        self._strategy = strategy
        self._streams = [StepStream(strategy, executor, depth, ended, on_step) for _ in range(streams)]
        self.worked = False

    @property
    def num_launched(self) -> int:
        """Uncollected steps, without those only for other ranks."""
        return sum([stream.num_launched for stream in self._streams])

    @property
    def last(self) -> Plan | None:
        plans = [plan for stream in self._streams if (plan := stream.last) is not None]
        return max(plans, key=lambda plan: plan.seq, default=None)

    def next_plan(self, now_s: float, *, paused: bool) -> Plan | None:
        return self._strategy.next_plan(now_s, [stream.full for stream in self._streams], paused=paused)

    def since_s(self, now_s: float) -> float:
        return self._strategy.since_s(now_s)

    def advance(self, plan: Plan | None) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        self.worked = False
        for number, stream in enumerate(self._streams):
            outputs += stream.advance(plan if plan is not None and plan.stream == number else None)
            self.worked |= stream.worked
        return outputs


MakePipeline = Callable[[OnStep], Pipeline[Any]]
