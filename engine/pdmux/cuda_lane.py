"""A CUDA stream whose work is enqueued by a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from engine.executor.executor import StreamTask, ThreadStream
from service.waiter import run_into, start_in_thread

T = TypeVar("T")


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


class CudaLane:
    """Stream with CUDA `priority`; lower numbers first."""

    def __init__(self, device: torch.device, *, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)  # as in CudaStream
        self._thread = ThreadStream(num_threads=1, around=lambda: torch.cuda.stream(self._stream))

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()

        def enqueue() -> torch.cuda.Event:
            run_into(future, work)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            return event

        enqueued = Future[torch.cuda.Event]()
        self._thread.submit(lambda: run_into(enqueued, enqueue))
        return _CudaLaneTask(future, enqueued)

    def close(self) -> None:
        self._thread.close()
        self._stream.synchronize()
