"""A thread that enqueues a phase's steps on a GPU, each in one of several partitions."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from engine.executor.executor import StreamTask, ThreadStream
from engine.executor.graphs import Capture, CudaCapture
from engine.kernels.tape import limit_sms
from service.waiter import run_into, start_in_thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A stream whose kernels run on `sms`, on the whole GPU if None; `others`: all but these."""

    stream: torch.cuda.Stream
    sms: int | None = None
    others: int | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Let kernels of Triton, cuBLASLt and CUTLASS divide their work among these SMs."""
        before = torch._C._get_sm_carveout_experimental()
        torch._C._set_sm_carveout_experimental(self.others)  # of the whole process, but decodes replay graphs
        try:
            with limit_sms(self.sms):
                yield
        finally:
            torch._C._set_sm_carveout_experimental(before)


class CudaLane:
    """FIFO stream over `partitions`; `chosen` returns the index of a submitted step's."""

    def __init__(self, partitions: Sequence[Partition], *, chosen: Callable[[], int]) -> None:
        self._partitions, self._chosen = partitions, chosen
        self._at = 0  # of the step that is being enqueued
        self._end: torch.cuda.Event | None = None  # of the step before
        self._thread = ThreadStream(num_threads=1)

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future, at = Future[T](), self._chosen()

        def enqueue() -> torch.cuda.Event:
            partition = self._partitions[at]
            if at != self._at and self._end is not None:
                partition.stream.wait_event(self._end)
            self._at = at
            with torch.cuda.stream(partition.stream), partition.counted():
                run_into(future, work)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as in CudaStream
                event.record(partition.stream)
            self._end = event
            return event

        enqueued = Future[torch.cuda.Event]()
        self._thread.submit(lambda: run_into(enqueued, enqueue))
        return _CudaLaneTask(future, enqueued)

    def new_capture(self) -> Capture:
        return _PartitionsCapture(self._partitions, lambda: self._at)

    def close(self) -> None:
        self._thread.close()
        for partition in self._partitions:
            partition.stream.synchronize()


class _PartitionsCapture:
    """Records work in each partition, and replays that of the running step.

    Kernels of a graph keep SMs and priority of the stream that they were recorded on.
    """

    def __init__(self, partitions: Sequence[Partition], at: Callable[[], int]) -> None:
        self._captures = [(partition, CudaCapture(partition.stream)) for partition in partitions]
        self._at = at

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        replays = []
        for partition, capture in self._captures:
            with partition.counted():
                replays.append(capture.capture(work))
        return lambda: replays[self._at()]()


class _CudaLaneTask(Generic[T]):
    def __init__(self, future: Future[T], enqueued: Future[torch.cuda.Event]) -> None:
        self._future = future
        self._enqueued = enqueued

    def result(self) -> T:
        self._enqueued.result().synchronize()
        return self._future.result()

    def done(self) -> bool:
        return self._enqueued.done() and bool(self._enqueued.result().query())  # type: ignore[no-untyped-call]

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        start_in_thread(lambda: self._enqueued.result().synchronize(), name="step end", when_done=lambda: call(self))
