"""A wait of one task that a callback ends, pauses that end together, the end of tasks, and the event loop's time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def loop_time_s() -> float:
    """Monotonic, and virtual in a simulation."""
    return asyncio.get_running_loop().time()


async def end_tasks(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel tasks, and wait until they have ended, however they do."""
    ended = tuple(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


class Waiter:
    """Lets one task wait for `wake`. A call while no task waits has no effect: check the condition before `wait`."""

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
    """Pauses of tasks that go on until `end`. `num`: of such tasks."""

    def __init__(self) -> None:
        self._over = False
        self._waiters: set[Waiter] = set()

    @property
    def num(self) -> int:
        return len(self._waiters)

    @contextmanager
    def taken(self) -> Iterator[Callable[[float], Awaitable[bool]]]:
        """The function of one task: it pauses for seconds and returns True, or False once all are to end."""
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
