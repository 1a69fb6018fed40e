"""FIFO streams of work; the scheduler's thread waits only to collect.

InlineStream   runs at submit (CPU default)
ThreadStream   one worker thread (CPU), with injected delays to find races
CudaStream     enqueues kernels on a torch.cuda.Stream, and copies of results to pinned memory
CudaLane       the same from its own thread, concurrent with the scheduler and another stream
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.background import run_into, start_in_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class StreamTask(Protocol[T_co]):
    def result(self) -> T_co:
        """Wait, and return or raise the result."""

    def done(self) -> bool:
        """`result` does not block."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Call it with the finished task, in any thread."""


class Stream(Protocol):
    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        """Enqueue work; its exceptions come from `result`."""

    def close(self) -> None: ...


class InlineStream:
    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()
        with torch.inference_mode():
            run_into(future, work)
        return future

    def close(self) -> None:
        """Do nothing: work ran in submit."""


class ThreadStream:
    def __init__(
        self,
        *,
        num_threads: int,
        max_delay_s: float = 0.0,
        seed: int = 0,
        begin: Callable[[], None] = lambda: None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._max_delay_s = max_delay_s
        self._begin = begin
        self._around = around
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
        self._begin()
        torch.set_num_threads(self._num_threads)  # each thread has its OpenMP team
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                if self._max_delay_s > 0:
                    time.sleep(self._random.uniform(0, self._max_delay_s))
                with self._around():
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
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaTask(future, event)

    def close(self) -> None:
        self._stream.synchronize()


class _CudaLaneTask(Generic[T]):
    def __init__(self, future: Future[T], enqueued: Future[torch.cuda.Event]) -> None:
        self._future = future
        self._enqueued = enqueued

    def result(self) -> T:
        self._enqueued.result().synchronize()
        return self._future.result()

    def done(self) -> bool:
        return self._enqueued.done() and self._enqueued.result().query()

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        start_in_thread(lambda: self._enqueued.result().synchronize(), name="step end", when_done=lambda: call(self))


class CudaLane:
    """Stream with CUDA `priority`; lower numbers first."""

    def __init__(self, device: torch.device, *, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)
        torch.cuda.synchronize(device)  # as in CudaStream
        self._thread = ThreadStream(num_threads=1, around=self._on_stream)

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()

        def enqueue() -> torch.cuda.Event:
            run_into(future, work)
            event = torch.cuda.Event()
            event.record(self._stream)
            return event

        enqueued = Future[torch.cuda.Event]()
        self._thread.submit(lambda: run_into(enqueued, enqueue))
        return _CudaLaneTask(future, enqueued)

    def close(self) -> None:
        self._thread.close()
        self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)
