"""Waits that callbacks end, common pauses, work in threads, the event loop's time."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar


def loop_time_s() -> float:
    """Monotonic, virtual in a simulation."""
    return asyncio.get_running_loop().time()


async def end_tasks(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    ended = tuple(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


class Waiter:
    """Lets one task wait for `wake`. Check the condition first, as an earlier `wake` is lost."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._future is not None and not self._future.done()

    def wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        assert self._future is None, "two tasks wait here"
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None


class Pauses:
    """Pauses of `num` tasks until `end`."""

    def __init__(self) -> None:
        self._over = False
        self._waiters: set[Waiter] = set()

    @property
    def num(self) -> int:
        return len(self._waiters)

    @contextlib.contextmanager
    def taken(self) -> Iterator[Callable[[float], Awaitable[bool]]]:
        """Yield a pause function, which returns False at the end of all."""
        waiter, loop = Waiter(), asyncio.get_running_loop()

        async def pause(seconds: float) -> bool:
            if not self._over:
                timer = loop.call_later(seconds, waiter.wake)
                try:
                    await waiter.wait()
                finally:
                    timer.cancel()
            return not self._over

        self._waiters.add(waiter)
        try:
            yield pause
        finally:
            self._waiters.discard(waiter)

    def end(self) -> None:
        self._over = True
        for waiter in self._waiters:
            waiter.wake()


SWITCH_S = 0.0005  # Python's default of 5 ms, times 16 streams, would show in ITL

T = TypeVar("T")


class Aside:
    """Runs work below `inline` in the loop, from `huge` on in a separate pool.

    One call into C keeps the interpreter, so it must be short for the longest input; in between the
    loop gets it within `SWITCH_S`.
    """

    def __init__(self, name: str, *, inline: int, huge: int, threads: int = 1) -> None:
        self._inline = inline
        self._huge = huge
        self._long = ThreadPoolExecutor(threads, name, initializer=_share)
        self._longest = ThreadPoolExecutor(1, f"{name}-huge", initializer=_share)

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """The result of `work` on `size` bytes or characters."""
        if size < self._inline:
            return work()
        pool = self._longest if size >= self._huge else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        for pool in (self._long, self._longest):
            pool.shutdown(wait=False, cancel_futures=True)


def _share() -> None:
    sys.setswitchinterval(SWITCH_S)


BODIES = Aside("bodies", inline=128 << 10, huge=1 << 20)  # for request bodies of all servers in the process


# ---- threads: wakers, work with its outcome in a future, usable cores. Never torch


class Waker:
    """Wakes a thread that polls descriptors, this one among them."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed: no thread waits
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


def start_in_thread(work: Callable[[], T], *, name: str, when_done: Callable[[], object]) -> Future[T]:
    """`when_done` is called in the thread, after the future is set."""
    future: Future[T] = Future()
    future.add_done_callback(lambda _: when_done())
    # a daemon, so that an ending process does not wait for a disk
    threading.Thread(target=run_into, args=(future, work), name=name, daemon=True).start()
    return future


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def usable_cores() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else len(os.sched_getaffinity(0))
