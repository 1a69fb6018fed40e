"""How long a client may take to send what it has to say. aiohttp's server waits for ever: a thousand connections that send a byte
a minute (slow loris) would hold a thousand sockets, and their bodies' memory.

The head of a request has `header_timeout_s` from the connection's first moment, or from the first byte after an answer; then
the connection is closed, as nothing was asked that could be answered. A body has `body_timeout_s`; then 408.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from router.http.routes import Handler
from security.expect import say_continue

# A kept connection between two requests. Also the bound for a second head that began before the first request's answer.
IDLE_S = 75.0
LINGER_S = 2.0  # that an unwanted rest of a body is read away, so that its sender gets to read why
_NO_ACCESS_LOG: Any = None  # as aiohttp's own runner has it; its types do not


class TimedServer(web.Server):
    """`web.Server` whose connections have a deadline for each head."""

    def __init__(
        self,
        handler: Handler,
        *,
        request_factory: Callable[..., web.BaseRequest],
        header_timeout_s: float,
    ) -> None:
        super().__init__(
            _noting(handler),
            request_factory=request_factory,
            handler_cancellation=True,  # a client that goes away ends both legs at once
        )
        self._header_timeout_s = header_timeout_s

    def __call__(self) -> "TimedConnection":
        """A connection, as the event loop asks for one."""
        return TimedConnection(self, header_timeout_s=self._header_timeout_s)


def _noting(handler: Handler) -> Handler:
    """Tells the connection when a request begins and ends."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, TimedConnection)
        connection.on_head()
        try:
            return await handler(request)
        finally:
            connection.on_handled()

    return handle


class TimedConnection(web.RequestHandler):
    """A client's connection: waits for a head under a deadline, or has a request."""

    __slots__ = ("_deadline", "_has_request", "_header_timeout_s")

    def __init__(self, manager: TimedServer, *, header_timeout_s: float) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            access_log=_NO_ACCESS_LOG,
        )
        self._header_timeout_s = header_timeout_s
        self._has_request = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        if data and self._deadline is None and not self._has_request:
            self._begin()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end()
        super().connection_lost(exc)

    def on_head(self) -> None:
        """A whole head came."""
        self._has_request = True
        self._end()

    def on_handled(self) -> None:
        """The request is over; a next head begins with its first byte."""
        self._has_request = False

    def _begin(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self._header_timeout_s, self._on_deadline)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        self.force_close()


class TimedRequest(web.BaseRequest):
    """A request whose body must come in time, and is refused unread where its length says that it is too long."""

    body_timeout_s = 60.0

    async def read(self) -> bytes:
        if self.content_length is not None and self.content_length > self._client_max_size:
            raise web.HTTPRequestEntityTooLarge(max_size=self._client_max_size, actual_size=self.content_length)
        if self.content.is_eof():  # it came with the head, as most do: no loop, no copy
            return self._read_now()
        try:
            async with asyncio.timeout(self.body_timeout_s):
                await say_continue(self)
                return await super().read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    def _read_now(self) -> bytes:
        if self._read_bytes is None:
            body = self.content.read_nowait()
            if len(body) > self._client_max_size:
                raise web.HTTPRequestEntityTooLarge(max_size=self._client_max_size, actual_size=len(body))
            self._read_bytes = body
        return self._read_bytes
