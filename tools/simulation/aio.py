"""asyncio under virtual time: the part of an event loop that tasks, futures, sleeps and timeouts use. No selector, no I/O.

Callbacks run as events of a process, in the order they were asked for. So production coroutines run unchanged, and
die or freeze with their process.
"""

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tools.simulation.world import Process

MAX_ROUNDS = 100_000


class VirtualLoop:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._ready: deque[asyncio.Handle] = deque()
        self._pumping = False
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._num_tasks = 0
        self.errors: list[dict[str, Any]] = []
        process.on_death.append(self._die)

    # ---- what asyncio calls

    def time(self) -> float:
        return self._process.clock()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)  # type: ignore[arg-type]
        self._ready.append(handle)
        if not self._pumping and len(self._ready) == 1:
            self._process.after(0, "asyncio", self.pump)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)  # type: ignore[arg-type]
        self._process.after(max(0.0, when - self.time()), "asyncio timer", self._on_timer, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Its event finds it cancelled."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "task", context=context)  # type: ignore[arg-type]
        self._num_tasks += 1
        number = self._num_tasks
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))
        return task

    def run_in_executor(self, executor: None, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        """A thread does `work` in no time."""
        future = self.create_future()
        future.set_result(work())
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    # ---- running

    def _on_timer(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._ready.append(handle)
            self.pump()

    def pump(self) -> None:
        """Run what is ready, and what that makes ready."""
        self._pumping = True
        events._set_running_loop(self)  # type: ignore[arg-type]
        try:
            for _ in range(MAX_ROUNDS):
                if not self._ready:
                    return
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
            raise AssertionError("the event loop does not come to rest")
        finally:
            self._pumping = False
            events._set_running_loop(None)

    def run(self, act: Callable[[], Any]) -> Any:
        """Call `act` as a callback of this loop would be, then run what it made ready."""
        if self._pumping:
            return act()
        events._set_running_loop(self)  # type: ignore[arg-type]
        try:
            result = act()
        finally:
            events._set_running_loop(None)
        self.pump()
        return result

    def _die(self) -> None:
        """The process is gone: end its coroutines in order, so that nothing of them runs at some later collection."""
        for _ in range(5):
            for task in list(self._tasks.values()):
                task.cancel()
            self.pump()
