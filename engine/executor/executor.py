"""Launches plans and collects their results, on this rank's device and on other ranks; the scheduler has no other way to them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.core.plan import Plan, StepResult

if TYPE_CHECKING:  # it imports torch, which simulated streams do without
    from engine.executor.device_stream import DeviceStream, Launch
    from engine.executor.model_runner import ModelRunner

T = TypeVar("T")


class StepAnswer(Protocol):
    """Answer of other ranks to a step whose result does not show that they have run it."""

    def wait(self) -> object: ...

    def there(self) -> bool:
        """Whether `wait` returns at once."""

    def when_there(self, call: Callable[[], None]) -> None:
        """Call it once `there`, in any thread."""


class Ranks(Protocol):
    """The other ranks of a model (engine/ranks/followers.py)."""

    def step(self, plan: Plan) -> StepAnswer | None: ...

    def on_collected(self, result: StepResult) -> None:
        """Raise an error if this rank has not done what the others did."""

    def close(self) -> None: ...


class NoRanks:
    """This process has the whole model."""

    def step(self, plan: Plan) -> StepAnswer | None:
        return None

    def on_collected(self, result: StepResult) -> None:
        """Any result is as good: no other rank has one."""

    def close(self) -> None:
        """End nothing."""


class Executor:
    """Sends each step to the other `ranks`, just before it goes to one of the `streams` (Plan.stream) of this rank.

    Sampling stays here: other ranks get the tokens through the future map. `attention` is called in any thread when a step has
    ended; None: the caller waits in `collect`.
    """

    def __init__(
        self,
        streams: "Sequence[DeviceStream]",
        *,
        ranks: Ranks | None = None,
        attention: Callable[[], None] | None = None,
    ) -> None:
        self.streams = tuple(streams)
        self._ranks = ranks or NoRanks()
        self._attention = attention

    @property
    def runner(self) -> "ModelRunner":
        """Of the first stream."""
        return self.streams[0].runner

    def launch(self, plan: Plan) -> "Launch":
        """Enqueue a step."""
        answer = self._ranks.step(plan)
        launch = self.streams[plan.stream].launch(plan)
        launch.answer = answer
        self._watch(launch)
        return launch

    def launch_forward(self, plan: Plan) -> "Launch":
        """Enqueue a step without its sampling. `launch_sampling` comes before any other launch on its stream."""
        answer = self._ranks.step(plan)
        launch = self.streams[plan.stream].launch_forward(plan)
        launch.answer = answer
        return launch

    def launch_sampling(self, launch: "Launch") -> None:
        """Enqueue the sampling of a step once `plan.masks` are filled in."""
        self.streams[launch.plan.stream].launch_sampling(launch)
        self._watch(launch)

    @property
    def ended(self) -> "Callable[[Launch], bool] | None":
        """Return what says whether `collect` returns at once; None: no end calls for attention."""
        return None if self._attention is None else self._has_ended

    def _has_ended(self, launch: "Launch") -> bool:
        sampling = launch.sampling
        return sampling is not None and sampling.done() and (launch.answer is None or launch.answer.there())

    def _watch(self, launch: "Launch") -> None:
        attention, sampling = self._attention, launch.sampling
        if attention is None:
            return
        assert sampling is not None, f"step {launch.plan.seq} is not sampled yet"
        sampling.add_done_callback(lambda _: attention())
        if launch.answer is not None:
            launch.answer.when_there(attention)

    def collect(self, launch: "Launch") -> StepResult:
        """Wait for a step and read its results. Raises the error of the step, except that a want of memory is its result.

        With other ranks it raises GroupEnded in place of that: they have computed the step.
        """
        if launch.answer is not None:
            launch.answer.wait()
        result = self.streams[launch.plan.stream].collect(launch)
        self._ranks.on_collected(result)
        return result

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on this rank after every launched step, wait for it, and return or raise its outcome."""
        first, *others = self.streams
        for other in others:
            other.call(lambda: None)
        return first.call(work)

    def close(self) -> None:
        self._ranks.close()
        for stream in self.streams:
            stream.close()
