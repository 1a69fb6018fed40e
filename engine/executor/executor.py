"""Launches plans and collects their results, on this rank's device and on other ranks."""

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.core.plan import ItemResult, Plan, StepResult
from engine.executor.model_runner import DeviceOutOfMemory, ModelRunner
from engine.executor.passes import StepOutput
from engine.executor.step_part import Forward
from engine.messages import TokenLogprob
from engine.sampler.logprobs import Logprobs
from service.waiter import run_into, start_in_thread

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
    def step(self, plan: Plan) -> StepAnswer | None:
        return None

    def on_collected(self, result: StepResult) -> None: ...

    def close(self) -> None: ...


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
        return self.streams[0].runner

    def launch(self, plan: Plan) -> "Launch":
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
        self.streams[launch.plan.stream].launch_sampling(launch)
        self._watch(launch)

    @property
    def ended(self) -> "Callable[[Launch], bool] | None":
        """A check that `collect` returns at once, if ends are watched."""
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


T_co = TypeVar("T_co", covariant=True)


class StreamTask(Protocol[T_co]):
    def result(self) -> T_co:
        """Wait, and return or raise the result."""

    def done(self) -> bool:
        """`result` does not block."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Call it with the finished task, in any thread."""


class Stream(Protocol):
    """FIFO streams of work; the scheduler's thread waits only to collect.

    InlineStream   runs at submit (CPU default)
    ThreadStream   one worker thread (CPU), with injected delays to find races
    CudaStream     enqueues kernels on a torch.cuda.Stream, and copies of results to pinned memory
    """

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        """Enqueue work; its exceptions come from `result`."""

    def close(self) -> None: ...


class InlineStream:
    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()
        with torch.inference_mode():
            run_into(future, work)
        return future

    def close(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class ThreadStream:
    num_threads: int
    max_delay_s: float = 0.0
    seed: InitVar[int] = 0
    begin: Callable[[], None] = lambda: None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __post_init__(self, seed: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()
        self._work.put(lambda: run_into(future, work))
        return future

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        self.begin()
        torch.set_num_threads(self.num_threads)  # each thread has its OpenMP team
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                if self.max_delay_s > 0:
                    time.sleep(self._random.uniform(0, self.max_delay_s))
                with self.around():
                    work()


class _CudaTask(Generic[T]):
    def __init__(self, future: Future[T], event: torch.cuda.Event) -> None:
        self._future = future
        self._event = event

    def result(self) -> T:
        self._event.synchronize()
        return self._future.result()

    def done(self) -> bool:
        return self._event.query()

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        start_in_thread(self._event.synchronize, name="step end", when_done=lambda: call(self))


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # weights and a zeroed pool are still in flight on the default stream

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            run_into(future, work)
            event = torch.cuda.Event(blocking=True)  # a thread that waits for a step leaves its core to frontends
            event.record(self._stream)
        return _CudaTask(future, event)

    def close(self) -> None:
        self._stream.synchronize()


# ---- Executes steps of one device stream, in plan order.


@dataclass(slots=True, eq=False)
class Launch:
    """`forward`: its first half if sampling is separate. `answer`: of others."""

    plan: Plan
    sampling: StreamTask[StepOutput] | None = None
    forward: StreamTask[None] | None = None
    left: Forward | None = None
    answer: StepAnswer | None = None


class DeviceStream:
    def __init__(self, *, runner: ModelRunner, stream: Stream) -> None:
        self.runner = runner
        self._stream = stream

    def launch(self, plan: Plan) -> Launch:
        return Launch(plan, self._stream.submit(lambda: self.runner.run(plan)))

    def launch_forward(self, plan: Plan) -> Launch:
        launch = Launch(plan)

        def forward() -> None:
            launch.left = self.runner.forward(plan)

        launch.forward = self._stream.submit(forward)
        return launch

    def launch_sampling(self, launch: Launch) -> None:
        assert launch.sampling is None, f"step {launch.plan.seq} is sampled already"
        launch.sampling = self._stream.submit(lambda: self.runner.sample(launch.plan, launch.left))

    def collect(self, launch: Launch) -> StepResult:
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
