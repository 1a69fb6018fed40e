"""Launches plans and collects their results, on this rank's device and on other ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.core.plan import Plan, StepResult

if TYPE_CHECKING:  # it imports torch, which simulated streams do without
    from engine.executor.device_stream import DeviceStream, Launch
    from engine.executor.model_runner import ModelRunner

T = TypeVar("T")


class StepAnswer(Protocol):
    """Answer of other ranks to a step that its result does not prove."""

    def wait(self) -> object: ...

    def there(self) -> bool:
        """True if `wait` returns at once."""

    def when_there(self, call: Callable[[], None]) -> None:
        """Call it once `there`, on any thread."""


class Ranks(Protocol):
    """Other ranks of a model (engine/ranks/followers.py)."""

    def step(self, plan: Plan) -> StepAnswer | None: ...

    def on_collected(self, result: StepResult) -> None:
        """Raise an error if this rank's step failed, unlike the others'."""

    def close(self) -> None: ...


class NoRanks:
    """No other ranks."""

    def step(self, plan: Plan) -> StepAnswer | None:
        return None

    def on_collected(self, result: StepResult) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Executor:
    """Sends steps to other `ranks`, then to one of this rank's `streams` (Plan.stream).

    Only this rank samples; others read the future map. `attention`, if given, is called on any
    thread when a step has ended; else `collect` waits.
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
        """The first stream's runner."""
        return self.streams[0].runner

    def launch(self, plan: Plan) -> "Launch":
        """Enqueue a step."""
        answer = self._ranks.step(plan)
        launch = self.streams[plan.stream].launch(plan)
        launch.answer = answer
        self._watch(launch)
        return launch

    def launch_forward(self, plan: Plan) -> "Launch":
        """Enqueue a step without sampling; `launch_sampling` must be the stream's next launch."""
        answer = self._ranks.step(plan)
        launch = self.streams[plan.stream].launch_forward(plan)
        launch.answer = answer
        return launch

    def launch_sampling(self, launch: "Launch") -> None:
        """Enqueue sampling once `plan.masks` are set."""
        self.streams[launch.plan.stream].launch_sampling(launch)
        self._watch(launch)

    @property
    def ended(self) -> "Callable[[Launch], bool] | None":
        """Return a check that `collect` returns at once, if ends are watched."""
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
        """Wait for a step's results. Raises its error; lack of device memory is a result.

        With other ranks, which have computed the step, it raises GroupEnded instead.
        """
        if launch.answer is not None:
            launch.answer.wait()
        result = self.streams[launch.plan.stream].collect(launch)
        self._ranks.on_collected(result)
        return result

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` after all launched steps; wait, and return or raise its outcome."""
        first, *others = self.streams
        for other in others:
            other.call(lambda: None)
        return first.call(work)

    def close(self) -> None:
        self._ranks.close()
        for stream in self.streams:
            stream.close()
