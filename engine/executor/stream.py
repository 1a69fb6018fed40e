"""FIFO streams of work. The scheduler's thread waits for them only when it collects.

InlineStream   runs at submit (cpu default: nothing to overlap with)
ThreadStream   one worker thread (cpu): the asynchrony of a GPU, with injected delays, to shake out races
CudaStream     enqueues kernels on a torch.cuda.Stream, and copies of the results to pinned memory
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.background import run_into, start_in_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class StreamTask(Protocol[T_co]):
    def result(self) -> T_co:
        """Wait, and return or raise the outcome of the work."""

    def done(self) -> bool:
        """Whether `result` returns at once."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Call it with the outcome once that is there, in any thread."""


class Stream(Protocol):
    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        """Enqueue work. What it raises comes out of `result`, on every stream alike."""

    def close(self) -> None: ...


class InlineStream:
    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()
        with torch.inference_mode():
            run_into(future, work)
        return future

    def close(self) -> None:
        """Nothing runs outside submit."""


class ThreadStream:
    """`max_delay_s`: longest random sleep before each piece of work (tests)."""

    def __init__(self, *, num_threads: int, max_delay_s: float = 0.0, seed: int = 0) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._max_delay_s = max_delay_s
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
        torch.set_num_threads(self._num_threads)  # the OpenMP team belongs to a thread
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                if self._max_delay_s > 0:
                    time.sleep(self._random.uniform(0, self._max_delay_s))
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
        torch.cuda.synchronize(device)  # weights and a zeroed pool are still under way on the default stream

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            run_into(future, work)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaTask(future, event)

    def close(self) -> None:
        self._stream.synchronize()
