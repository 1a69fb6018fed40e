"""The HTTP server of all processes: uvicorn's, with deadlines and an orderly end.

Against slow clients (slow loris) a head has `header_timeout_s` from connection or first byte; a
body `body_timeout_s`, then 408. A client's disconnect cancels its request.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any, cast

import httptools
from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.http.errors import ApiError, RequestLimits
from service.http.listening import BACKLOG, ListeningPort
from service.http.request import CONNECTION
from service.http.routes import OPENAI

# Between two requests; also the deadline of a head that started before the last response.
IDLE_S = 75
MAX_HEAD_BYTES = 64 << 10  # of a request line with its headers
FIRST_HEAD_S = 0.5  # for a connection accepted just before the server ends
ACCEPT_ITERATIONS = 3  # asyncio's iterations from an accept to `connection_made`
LINGER_S = 2.0  # discards the rest of a body, so that its sender reads the error


@asynccontextmanager
async def serving(
    place: ListeningPort | Path, app: ASGIApp, limits: RequestLimits, *, shutdown_timeout_s: float
) -> AsyncIterator[None]:
    server = HttpServer(app, limits, shutdown_timeout_s=shutdown_timeout_s)
    try:
        await (server.serve_unix(place) if isinstance(place, Path) else server.serve(place))
        yield
    finally:
        await server.close()


class _State(ServerState):
    """The shared state of connections; the date is made once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._dated_s = 0

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now_s = int(time.time())
        if now_s != self._dated_s:
            self._dated_s, self._headers = now_s, [(b"date", formatdate(now_s, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._headers = headers


class HttpServer:
    """Serves ports until `close`, which leaves live requests `shutdown_timeout_s`."""

    def __init__(self, app: ASGIApp, limits: RequestLimits, *, shutdown_timeout_s: float) -> None:
        self._config = Config(
            app,
            http=HttpConnection,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_S,
        )
        self._config.load()
        self._header_timeout_s = limits.header_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._state = _State()
        self._listeners: list[asyncio.Server] = []

    async def serve(self, port: ListeningPort) -> None:
        """Accept connections; later ones queue in the kernel, as `port` outlives the server."""
        loop = asyncio.get_running_loop()
        for sock in port.sockets:
            listener = await loop.create_server(self.connect, sock=sock.dup(), backlog=BACKLOG)
            self._listeners.append(listener)

    async def serve_unix(self, path: Path) -> None:
        listener = await asyncio.get_running_loop().create_unix_server(self.connect, str(path), backlog=BACKLOG)
        self._listeners.append(listener)

    async def close(self) -> None:
        """Stop accepting before closing, as asyncio drops connections accepted in between."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            for sock in listener.sockets:
                loop.remove_reader(sock)
        for _ in range(ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        connections = [cast(HttpConnection, connection) for connection in self._state.connections]
        await asyncio.gather(*(connection.finish(self._shutdown_timeout_s) for connection in connections))

    def connect(self) -> "HttpConnection":
        return HttpConnection(self._config, self._state, header_timeout_s=self._header_timeout_s)


class HttpConnection(HttpToolsProtocol):
    """A connection with deadlines; at the end a fresh one still gets a response."""

    def __init__(self, config: Config, state: ServerState, *, header_timeout_s: float) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self.broken = ""  # why the rest of a body cannot be read
        self._header_timeout_s = header_timeout_s
        self._head_bytes: int | None = None  # of an incomplete head
        self._deadline: asyncio.TimerHandle | None = None
        self._lingers = False
        self._first_head = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ---- what requests see

    @property
    def is_full(self) -> bool:
        return self.flow.write_paused

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    # ---- the transport's events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport
        self.transport = cast(asyncio.Transport, _Lingering(self, transport))
        self._opened_s = self.loop.time()
        self._begin()

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        self._unset_keepalive_if_required()
        if self._deadline is None and not self._is_busy:
            self._begin()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # nothing here upgrades, and the parser reads no further
        except httptools.HttpParserError as error:
            return self._on_no_http(" ".join(str(error.__context__ or error).split()))
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._on_no_http(f"its head is longer than {MAX_HEAD_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)
        if self._task is not None:
            self._task.cancel()

    # ---- the parser's events

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        cast(dict[str, Any], self.scope)[CONNECTION] = self

    def on_headers_complete(self) -> None:
        self._end()
        self._head_bytes = None
        self._first_head.set()
        super().on_headers_complete()

    # ---- requests

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(self._task)
        self._task.add_done_callback(self.tasks.discard)

    def linger(self) -> bool:
        """Discard the client's data for `LINGER_S`: a reset could overtake the answer."""
        if not self._lingers and self.cycle is not None and self.cycle.more_body and not self.broken:
            self._lingers = True
            self._end()
            self._deadline = self.loop.call_later(LINGER_S, self._on_deadline)
            self._socket.write_eof()
        return self._lingers

    async def finish(self, timeout_s: float) -> None:
        """Answer a live or a first request, and close."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._opened_s + FIRST_HEAD_S):
                await self._first_head.wait()
        self.shutdown()
        if self._task is not None and not self._task.done():
            await asyncio.wait((self._task,), timeout=timeout_s)
            if not self._task.done():
                self._socket.abort()

    # ---- heads

    def _begin(self) -> None:
        self._deadline = self.loop.call_later(self._header_timeout_s, self._on_deadline)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        self._socket.abort()

    def _on_no_http(self, what: str) -> None:
        if self._is_busy:  # the handler answers
            self.broken, self.cycle.keep_alive, self.cycle.more_body = what, False, False
            return self.cycle.message_event.set()
        refusal = OPENAI.response(ApiError(400, f"the request is not HTTP/1.1: {what}", code="invalid_http"))
        lines = [b"HTTP/1.1 400 Bad Request", *map(b": ".join, refusal.raw_headers), b"connection: close", b""]
        self._socket.write(b"\r\n".join((*lines, bytes(refusal.body))))
        self._socket.close()


class _Lingering:
    """A transport whose `close` waits for the rest of an unread body."""

    def __init__(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        self.connection = connection
        self._raw = transport
        self.write, self.is_closing = transport.write, transport.is_closing

    def close(self) -> None:
        if not self.connection.linger():
            self._raw.close()
