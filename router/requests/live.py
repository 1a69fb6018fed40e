"""The end of a router in good order: no new requests, those that run are finished or handed back. No HTTP routes here;
what signals ask for is service/process/stop_signals.py's.

Owns who runs: each request is a `LiveRequest` that can be handed back, by cancelling it before its answer has begun, or by
cutting the worker's stream after that, so that its last event says why.
"""

import asyncio
import logging
from collections.abc import Callable

from service.process.draining import wait_while

log = logging.getLogger(__name__)


class LiveRequest:
    """One request as it runs, from its handler's first line to its last. `cut`: closes the stream that it reads from."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self.handed_back = False
        self.cut: Callable[[], None] | None = None
        self._task = task

    def hand_back(self) -> None:
        self.handed_back = True
        if self.cut is not None:
            self.cut()
        else:
            self._task.cancel()

    def took_cancel(self) -> bool:
        """In a handler that is being cancelled: whether this was us (then it answers), and not its client."""
        if self.handed_back:
            self._task.uncancel()
        return self.handed_back


class LiveRequests:
    """Who is here: runs, or waits for its turn (line.py)."""

    def __init__(self) -> None:
        self.draining = False
        self._requests: dict[int, LiveRequest] = {}  # by id, in order of arrival

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[LiveRequest]:
        """In order of arrival."""
        return list(self._requests.values())

    def begin(self) -> LiveRequest:
        """The task that calls serves a request from now on, until `end`. (No context manager: it would cost ten times this.)"""
        task = asyncio.current_task()
        assert task is not None
        request = LiveRequest(task)
        self._requests[id(request)] = request
        return request

    def end(self, request: LiveRequest) -> None:
        del self._requests[id(request)]

    async def drain(self, *, timeout_s: float, at_once: asyncio.Event) -> None:
        """Nothing new from now on. Returns when nothing runs; what does not end in time is handed back."""
        self.draining = True
        if self._requests:
            log.info("draining: %d requests run, for up to %g s (--drain-timeout)", len(self), timeout_s)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        await wait_while(lambda: bool(self._requests) and loop.time() < deadline_s, at_once=at_once)
        if self._requests:
            log.warning("draining: %d requests have not ended and are handed back", len(self))
        for request in self.requests():
            request.hand_back()
