"""Keep-alive bytes in silent streams, as proxies cut them after 30 to 60 seconds."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from service.http.request import HttpRequest, StreamedResponse
from service.http.routes import SSE_HEADERS, open_stream, shape_of

# Set by a router that writes them itself: a worker's first byte is then output.
NO_BEATS_HEADER = "x-tandem-no-keep-alive"


class KeepAlive:
    """Context that writes into a stream after `interval_s` of silence (0: never).

    `stream` is None before the first write. One timer compares the bytes sent; writers report
    nothing.
    """

    def __init__(self, request: HttpRequest, *, interval_s: float) -> None:
        self.stream: StreamedResponse | None = None
        self._request = request
        self._beat = shape_of(request.path).beat
        self._interval_s = interval_s
        self._num_bytes = 0  # sent at the last check
        self._has_beaten = False  # since other output
        self._is_over = False
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if interval_s and self._beat:
            self._timer = asyncio.get_running_loop().call_later(interval_s, self._on_timer)

    def __enter__(self) -> "KeepAlive":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    async def open(self, *, headers: Mapping[str, str], status: int = 200) -> StreamedResponse:
        """Return the stream, after a keep-alive with status 200 and an event stream's headers."""
        async with self._turn:
            if self.stream is None:
                self.stream = open_stream(self._request, headers=headers, status=status)
        return self.stream

    async def end(self) -> None:
        """Stop writing, before the stream's end."""
        self.__exit__()
        async with self._turn:
            return

    def _on_timer(self) -> None:
        """Check every half interval."""
        num_bytes = 0 if self.stream is None else self.stream.num_bytes
        if num_bytes != self._num_bytes or self._has_beaten:
            self._num_bytes, self._has_beaten = num_bytes, False
        elif self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        self._timer = asyncio.get_running_loop().call_later(self._interval_s / 2, self._on_timer)

    async def _write(self) -> None:
        with suppress(ConnectionError):  # the client disconnected; its request is cancelled
            async with self._turn:
                if self._is_over:
                    return
                if self.stream is None:
                    self.stream = open_stream(self._request, headers=SSE_HEADERS)
                await self.stream.write(self._beat)
                self._num_bytes, self._has_beaten = self.stream.num_bytes, True
