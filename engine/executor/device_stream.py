"""Executes steps of one device stream, in plan order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.core.plan import ItemResult, Plan, StepResult
from engine.executor.executor import StepAnswer, Stream, StreamTask
from engine.executor.model_runner import DeviceOutOfMemory, ModelRunner
from engine.executor.sample_pass import StepOutput
from engine.executor.step_part import Forward
from engine.messages import TokenLogprob
from engine.sampler.logprobs import Logprobs

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Launch:
    """A launched step. `forward`: its first half if sampling is separate, which leaves `left`.

    `answer`: of other ranks.
    """

    plan: Plan
    sampling: StreamTask[StepOutput] | None = None
    forward: StreamTask[None] | None = None
    left: Forward | None = None
    answer: StepAnswer | None = None


class DeviceStream:
    """A stream with its model runner."""

    def __init__(self, *, runner: ModelRunner, stream: Stream) -> None:
        self.runner = runner
        self._stream = stream

    def launch(self, plan: Plan) -> Launch:
        """Enqueue a step (an inline stream runs it)."""
        return Launch(plan, self._stream.submit(lambda: self.runner.run(plan)))

    def launch_forward(self, plan: Plan) -> Launch:
        """Enqueue a step without sampling; `launch_sampling` must be the next launch."""
        launch = Launch(plan)

        def forward() -> None:
            launch.left = self.runner.forward(plan)

        launch.forward = self._stream.submit(forward)
        return launch

    def launch_sampling(self, launch: Launch) -> None:
        """Enqueue sampling once `plan.masks` are set."""
        assert launch.sampling is None, f"step {launch.plan.seq} is sampled already"
        launch.sampling = self._stream.submit(lambda: self.runner.sample(launch.plan, launch.left))

    def collect(self, launch: Launch) -> StepResult:
        """Wait for a step's results. Raises its error; lack of device memory is a result."""
        assert launch.sampling is not None, f"step {launch.plan.seq} is not sampled yet"
        try:
            if launch.forward is not None:
                launch.forward.result()  # done by then; its error is the first one
            output: StepOutput | str = launch.sampling.result()
        except DeviceOutOfMemory as error:
            output = str(error)
        self.runner.wait_for_copies(launch.plan.seq)
        if isinstance(output, str):
            items = [ItemResult(token=None) for _ in launch.plan.items]
            return StepResult(seq=launch.plan.seq, items=items, failure=output)
        return _step_result(launch.plan, output)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` after all launched steps; wait, and return or raise its outcome."""
        return self._stream.submit(work).result()

    def close(self) -> None:
        self._stream.close()
        self.runner.close()


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
    for i, guesses in output.drafted().items():
        items[i].drafted = guesses
    return StepResult(seq=plan.seq, items=items)


def _token_logprobs(logprobs: Logprobs) -> list[TokenLogprob]:
    ids = logprobs.token_ids.tolist()
    values, top_ids = logprobs.top_values.tolist(), logprobs.top_ids.tolist()
    requested = logprobs.requested.tolist()
    return [
        TokenLogprob(
            chosen,
            token_id,
            list(zip(values[r], top_ids[r], strict=True)),
            list(zip(requested[r], logprobs.requested_ids, strict=True)),
        )
        for r, (chosen, token_id) in enumerate(zip(logprobs.chosen.tolist(), ids, strict=True))
    ]
