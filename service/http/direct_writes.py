"""Writes of events from the callback that receives them, as waking the request's task would double
their cost.
"""

from collections.abc import Callable
from typing import cast

from aiohttp import web

from service.http.server import TimedConnection
from service.waiter import Waiter

MOST_UNDRAINED_BYTES = 60_000  # aiohttp drains above 64 KiB


class DirectWrites:
    """Writes the bytes of `take` at each `on_change`, while the task is in `wait`.

    The task resumes at the end, on errors, and if a write may have to drain, which a callback
    cannot.
    """

    def __init__(
        self, http: web.BaseRequest, out: web.StreamResponse, *, take: Callable[[], bytes], is_over: Callable[[], bool]
    ) -> None:
        self._connection = cast(TimedConnection, http.protocol)
        self._writer = http.writer
        self._out = out
        self._take = take
        self._is_over = is_over
        self._stopped = Waiter()
        self._left = b""
        self._error: Exception | None = None

    async def wait(self) -> bytes:
        """Return bytes to write. Raises a callback's error."""
        await self._stopped.wait()
        if self._error is not None:
            raise self._error
        left, self._left = self._left, b""
        return left

    def on_change(self) -> None:
        if not self._stopped.is_waiting:
            return
        if self._is_over() or self._connection.is_full:
            return self._stopped.wake()
        try:
            self._pass_on(self._take())
        except Exception as error:  # mostly of the client's connection
            self._error = error
            self._stopped.wake()

    def _pass_on(self, data: bytes) -> None:
        if self._writer.buffer_size + len(data) > MOST_UNDRAINED_BYTES:
            self._left = data
            self._stopped.wake()
        elif data:
            _write_now(self._out, data)


def _write_now(out: web.StreamResponse, data: bytes) -> None:
    writing = out.write(data)
    try:
        writing.send(None)
    except StopIteration:
        return
    writing.close()
    raise AssertionError("so few bytes wait for nothing")
