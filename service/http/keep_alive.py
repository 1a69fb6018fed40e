"""Keeps a silent stream open: proxies cut a connection on which nothing comes, most after 30 to 60 seconds."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import web

from service.http.api_shapes import shape_of
from service.http.stream import SSE_HEADERS, CoalescedResponse, open_stream

# A router that keeps its clients' streams open has its workers write none: their first byte is then an output.
NO_BEATS_HEADER = "x-tandem-no-keep-alive"


class KeepAlive:
    """Writes into the stream of `request` whenever it would be silent for longer than `interval_s` (0: never); opens it, if need be.

    Use as a context manager. Until the first beat nothing is sent, so that an error can have its status; `stream` is None then.
    One timer a stream, which reads how many bytes have been sent: writers note nothing.
    """

    def __init__(self, request: web.BaseRequest, *, interval_s: float) -> None:
        self.stream: CoalescedResponse | None = None
        self._request = request
        self._beat = shape_of(request.path).beat
        self._interval_s = interval_s
        self._num_bytes = 0  # that had left at the last look
        self._has_beaten = False  # and nothing else has been written since
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

    async def open(self, *, headers: Mapping[str, str], status: int = 200) -> CoalescedResponse:
        """The stream. After a beat it has the headers of an event stream and status 200 already."""
        async with self._turn:
            if self.stream is None:
                self.stream = await open_stream(self._request, headers=headers, status=status)
        return self.stream

    async def end(self) -> None:
        """Write nothing more; call it before the end of the stream."""
        self.__exit__()
        async with self._turn:
            return

    def _on_timer(self) -> None:
        """Every half interval: bytes that left may have done so right at its begin. Half an interval after a beat is early."""
        num_bytes = self._request.writer.output_size
        if num_bytes != self._num_bytes or self._has_beaten:
            self._num_bytes, self._has_beaten = num_bytes, False
        elif self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        self._timer = asyncio.get_running_loop().call_later(self._interval_s / 2, self._on_timer)

    async def _write(self) -> None:
        with suppress(ConnectionError):  # the client went away; its request is cancelled
            async with self._turn:
                if self._is_over:
                    return
                if self.stream is None:
                    self.stream = await open_stream(self._request, headers=SSE_HEADERS)
                await self.stream.write(self._beat)
                self._num_bytes, self._has_beaten = self._request.writer.output_size, True
