"""Launches plans on the device and collects their results; the scheduler has no other way to the device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from engine.core.plan import ItemResult, Plan, StepResult
from engine.executor.model_runner import Forward
from engine.executor.sample_pass import Logprobs, StepOutput
from engine.executor.stream import Stream, StreamTask
from engine.messages import TokenLogprob

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Launch:
    """A step on the stream. `forward`: its first half, where the halves are launched apart; `sampling` comes later then."""

    plan: Plan
    sampling: StreamTask[StepOutput] | None = None
    forward: StreamTask[None] | None = None
    between: Forward = field(default_factory=Forward)


class Runner(Protocol):
    def run(self, plan: Plan) -> StepOutput: ...

    def forward(self, plan: Plan, out: Forward) -> None: ...

    def sample(self, plan: Plan, forward: Forward) -> StepOutput: ...


class Executor:
    def __init__(self, *, runner: Runner, stream: Stream) -> None:
        self._runner = runner
        self._stream = stream

    def watch(self, wrap: Callable[[Runner], Runner]) -> None:
        """Steps launched from now on run by what `wrap` makes of the runner (benchmarks time them in the stream)."""
        self._runner = wrap(self._runner)

    def launch(self, plan: Plan) -> Launch:
        """Enqueue a step; returns at once (an inline stream has run it by then)."""
        return Launch(plan, self._stream.submit(lambda: self._runner.run(plan)))

    def launch_forward(self, plan: Plan) -> Launch:
        """Enqueue a step without its sampling: nothing else may be launched before `launch_sampling`. `plan.masks` is not read."""
        launch = Launch(plan)
        launch.forward = self._stream.submit(lambda: self._runner.forward(plan, launch.between))
        return launch

    def launch_sampling(self, launch: Launch) -> None:
        """Enqueue the sampling of a step whose `plan.masks` are filled in now."""
        assert launch.sampling is None, f"step {launch.plan.seq} is sampled already"
        launch.sampling = self._stream.submit(lambda: self._runner.sample(launch.plan, launch.between))

    def collect(self, launch: Launch) -> StepResult:
        """Wait for a step and read its results. An error of the step is raised here."""
        assert launch.sampling is not None, f"step {launch.plan.seq} is not sampled yet"
        if launch.forward is not None:
            launch.forward.wait()  # done by then; its error is the first one
        return _step_result(launch.plan, launch.sampling.wait())

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in stream order: after every launched step. Waits for it; what it raises is raised here."""
        return self._stream.submit(work).wait()

    def close(self) -> None:
        self._stream.close()


def _step_result(plan: Plan, output: StepOutput) -> StepResult:
    items = [ItemResult(token=None) for _ in plan.items]
    for i, token, bad in zip(output.sampled, output.tokens.tolist(), output.bad.tolist(), strict=True):
        items[i].token, items[i].bad = token, bad
    for i, logprobs in output.logprobs.items():
        items[i].logprob = _token_logprobs(logprobs)[0]
    for i, parts in output.input_logprobs.items():
        items[i].input_logprobs = [entry for part in parts for entry in _token_logprobs(part)]
    for i, rows in output.hidden.items():
        items[i].hidden = rows.numpy().tobytes()
    return StepResult(seq=plan.seq, items=items)


def _token_logprobs(logprobs: Logprobs) -> list[TokenLogprob]:
    ids = logprobs.token_ids.tolist()
    values, top_ids = logprobs.top_values.tolist(), logprobs.top_ids.tolist()
    requested = [[] for _ in ids] if logprobs.requested is None else logprobs.requested.tolist()
    return [
        TokenLogprob(
            chosen,
            token_id,
            list(zip(values[r], top_ids[r], strict=True)),
            list(zip(requested[r], logprobs.requested_ids, strict=False)),
        )
        for r, (chosen, token_id) in enumerate(zip(logprobs.chosen.tolist(), ids, strict=True))
    ]
