"""The HTTP server of all processes: aiohttp's without application layer, with deadlines.

aiohttp waits forever, so slow clients (slow loris) could hold every socket. A head has
`header_timeout_s` from connection or first byte; a body `body_timeout_s`, then 408.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from service.http.errors import INTERNAL_ERROR, USUAL_TIMES, ApiError, check_bounds, coding_of, inflate
from service.http.listening import BACKLOG, ListeningPort
from service.http.routes import OPENAI, Handler, plain_path
from service.waiter import BODIES, Waiter

# Between two requests; also the deadline of a head that started before the last response.
IDLE_S = 75.0
SMALL_BYTES = 4 << 10  # smaller bodies inflate in the loop, and need no check of bounds
FIRST_HEAD_S = 0.5  # for a connection accepted just before the server ends
ACCEPT_ITERATIONS = 3  # asyncio's iterations from an accept to `connection_made`
LINGER_S = 2.0  # discards the rest of a body, so that its sender reads the error
_NO_ACCESS_LOG: Any = None  # as in aiohttp's runner; its types lack it
_log = logging.getLogger("service.http")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of requests; `size_flag` sets `max_body_bytes`, if there is a flag."""

    max_body_bytes: int
    header_timeout_s: float = 60.0
    body_timeout_s: float = 300.0
    size_flag: str = ""

    def too_long(self) -> ApiError:
        hint = f" ({self.size_flag})" if self.size_flag else ""
        return ApiError(413, f"the body is longer than {self.max_body_bytes} bytes{hint}", code="body_too_large")

    def too_slow(self) -> ApiError:
        return ApiError(408, f"the body did not come within {self.body_timeout_s:g} s", code="body_too_slow")


def make_runner(handle: Handler, limits: RequestLimits, *, shutdown_timeout_s: float) -> web.ServerRunner:
    """Return a server. A client's disconnect cancels its request."""

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        message = with_plain_path(message)
        request = TimedRequest(message, payload, protocol, writer, task, loop, client_max_size=limits.max_body_bytes)
        request.limits = limits
        return request

    server = TimedServer(handle, request_factory=make_request, header_timeout_s=limits.header_timeout_s)
    return TimedRunner(server, shutdown_timeout=shutdown_timeout_s)


def with_plain_path(message: Any) -> Any:
    """Normalize a head's path, for one spelling everywhere."""
    url = message.url
    plain = plain_path(url.raw_path)
    return (
        message if plain == url.raw_path else message._replace(url=url.with_path(plain, encoded=True, keep_query=True))
    )


@asynccontextmanager
async def serving(
    port: ListeningPort, handle: Handler, limits: RequestLimits, *, shutdown_timeout_s: float
) -> AsyncIterator[None]:
    async with _running(make_runner(handle, limits, shutdown_timeout_s=shutdown_timeout_s)) as runner:
        await port.serve(runner)
        yield


@asynccontextmanager
async def serving_unix(
    path: Path, handle: Handler, limits: RequestLimits, *, shutdown_timeout_s: float
) -> AsyncIterator[None]:
    async with _running(make_runner(handle, limits, shutdown_timeout_s=shutdown_timeout_s)) as runner:
        await web.UnixSite(runner, str(path), backlog=BACKLOG).start()
        yield


@asynccontextmanager
async def _running(runner: web.ServerRunner) -> AsyncIterator[web.ServerRunner]:
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


class TimedRunner(web.ServerRunner):
    """Stops accepting before it closes, as asyncio drops connections accepted in between."""

    async def cleanup(self) -> None:
        loop = asyncio.get_running_loop()
        for site in self.sites:
            for sock in getattr(site._server, "sockets", ()):
                loop.remove_reader(sock)
        for _ in range(ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        await super().cleanup()


class TimedServer(web.Server):
    def __init__(
        self, handle: Handler, *, request_factory: Callable[..., web.BaseRequest], header_timeout_s: float
    ) -> None:
        super().__init__(_noting(handle), request_factory=request_factory, handler_cancellation=True)
        self._header_timeout_s = header_timeout_s

    def __call__(self) -> "TimedConnection":
        return TimedConnection(self, header_timeout_s=self._header_timeout_s)


def _noting(handle: Handler) -> Handler:

    async def noted(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, TimedConnection)
        connection.on_head()
        try:
            return await handle(request)
        finally:
            connection.on_handled()

    return noted


class TimedConnection(web.RequestHandler):
    """A connection with deadlines; at the end a fresh one still gets a response."""

    __slots__ = ("_deadline", "_first_head", "_has_request", "_header_timeout_s", "_opened_s")

    def __init__(self, manager: TimedServer, *, header_timeout_s: float) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            access_log=_NO_ACCESS_LOG,
            logger=_log,
            auto_decompress=False,
        )
        self._header_timeout_s = header_timeout_s
        self._has_request = False
        self._deadline: asyncio.TimerHandle | None = None
        self._first_head = asyncio.Event()
        self._opened_s = self._loop.time()

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

    def close(self) -> None:
        """Refuse further requests, but not the first."""
        if self._first_head.is_set():
            super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._opened_s + FIRST_HEAD_S):
                await self._first_head.wait()
        await super().shutdown(timeout)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP, and close."""
        super().handle_error(request, status, exc, message)  # logs
        error = ApiError(500, "internal error; the server's log has the details", code=INTERNAL_ERROR)
        if status < 500:
            what = " ".join((message or "").encode("ascii", "backslashreplace").decode().split())
            error = ApiError(status, f"the request is not HTTP/1.1: {what}", code="invalid_http")
        response = OPENAI.response(error)
        response.force_close()
        return response

    @property
    def is_full(self) -> bool:
        """True while writes wait for the client."""
        return bool(self._paused)

    def on_head(self) -> None:
        self._has_request = True
        self._first_head.set()
        self._end()

    def on_handled(self) -> None:
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
    """Refuses late or large bodies."""

    limits: RequestLimits

    async def read(self) -> bytes:
        """Return the inflated body. Raises ApiError(400, 408, 413, 415)."""
        if self._read_bytes is None:
            body = await self._received()
            if coding := coding_of(self.headers.get("Content-Encoding", "")):
                body = await self._inflated(body, coding)
            if len(body) > SMALL_BYTES:
                await BODIES.run(partial(check_bounds, body), size=len(body))
            self._read_bytes = body
        return self._read_bytes

    async def _inflated(self, body: bytes, coding: str) -> bytes:
        size = USUAL_TIMES * len(body) if len(body) > SMALL_BYTES else len(body)
        return await BODIES.run(partial(inflate, body, coding, most_bytes=self.limits.max_body_bytes), size=size)

    async def _received(self) -> bytes:
        if self.content_length is not None and self.content_length > self.limits.max_body_bytes:
            raise self.limits.too_long()
        if self.content.is_eof():  # usually it came with the head
            return self._checked(self.content.read_nowait())
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                await self._send_continue()
                while piece := await self.content.readany():
                    pieces.append(piece)
                    size += len(self._checked(piece, before=size))
        except TimeoutError:
            raise self.limits.too_slow() from None
        return b"".join(pieces)

    def _checked(self, piece: bytes, *, before: int = 0) -> bytes:
        if before + len(piece) > self.limits.max_body_bytes:
            raise self.limits.too_long()
        return piece

    async def _send_continue(self) -> None:
        """Answer curl above 1 MiB. Other expectations are ignored (RFC 9110, 10.1.1)."""
        if self.version == HttpVersion11 and self.headers.get("Expect", "").lower() == "100-continue":
            await self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.writer.output_size = 0  # not part of the response


def _is_ours(record: logging.LogRecord) -> bool:
    """Drop tracebacks of clients that do not speak HTTP."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, HttpProcessingError | web.RequestPayloadError | ConnectionError)


_log.addFilter(_is_ours)


MAX_UNDRAINED_BYTES = 60_000  # aiohttp drains above 64 KiB


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
        if self._writer.buffer_size + len(data) > MAX_UNDRAINED_BYTES:
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
