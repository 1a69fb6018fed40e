"""The executors of two lanes (engine/core/lanes.py): each has a stream and all that steps keep, over one model and one KV pool."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from engine.core.lanes import Lane
from engine.core.plan import Plan, StepResult
from engine.executor.executor import Executor, Launch
from engine.executor.model_runner import ModelRunner

T = TypeVar("T")


class LaneExecutor:
    """`give`: sets the parts of the device, of `parts`, that decode steps have. `attention` is called in any thread when a step has ended."""

    def __init__(
        self, lanes: Mapping[Lane, Executor], *, parts: int, give: Callable[[int], None], attention: Callable[[], None]
    ) -> None:
        self.lanes = dict(lanes)
        self.parts = parts
        self.give = give
        self._attention = attention

    @property
    def runner(self) -> ModelRunner:
        """Of the decode lane."""
        return self.lanes[Lane.DECODE].runner

    @property
    def runners(self) -> tuple[ModelRunner, ...]:
        return tuple(executor.runner for executor in self.lanes.values())

    def launch(self, plan: Plan) -> Launch:
        launch = self._of(plan).launch(plan)
        self._watch(launch)
        return launch

    def launch_forward(self, plan: Plan) -> Launch:
        return self._of(plan).launch_forward(plan)

    def launch_sampling(self, launch: Launch) -> None:
        self._of(launch.plan).launch_sampling(launch)
        self._watch(launch)

    def ended(self, launch: Launch) -> bool:
        """Whether `collect` returns at once."""
        return launch.sampling is not None and launch.sampling.done()

    def collect(self, launch: Launch) -> StepResult:
        return self._of(launch.plan).collect(launch)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` after every launched step of both lanes, wait for it, and return or raise its outcome."""
        first, *others = self.lanes.values()
        for other in others:
            other.call(lambda: None)
        return first.call(work)

    def close(self) -> None:
        for executor in self.lanes.values():
            executor.close()

    def _of(self, plan: Plan) -> Executor:
        assert plan.lane is not None, f"step {plan.seq} has no lane"
        return self.lanes[plan.lane]

    def _watch(self, launch: Launch) -> None:
        assert launch.sampling is not None
        launch.sampling.add_done_callback(lambda _: self._attention())
