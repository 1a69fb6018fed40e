"""Requests and answers of an ASGI server, as handlers see them."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl, quote, quote_from_bytes, unquote, unquote_to_bytes

from fastapi import Request as FastApiRequest
from fastapi import Response
from multidict import CIMultiDict
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.errors import USUAL_TIMES, ApiError, RequestLimits, check_bounds, coding_of, inflate
from service.waiter import BODIES, Waiter

T = TypeVar("T")

# ---- Normalization of request paths before any rule. Pure.

# Matches paths that may not be normal: escapes, or bytes that need one, backslashes, empty
# segments, dots, a trailing slash.
_ODD = re.compile(r"[^!-~]|%|\\|//|/\.|./$")
_IN_SEGMENTS = "!$&'()*+,;=:@~"  # allowed in a path by RFC 3986, beyond those that quote() leaves


def plain_path(raw: str) -> str:
    """Decode escapes once; drop dot and empty segments and a trailing slash.

    Encoded slashes and backslashes count as slashes. Bytes that are not UTF-8 stay.
    """
    if not raw.startswith("/") or not _ODD.search(raw):
        return raw
    kept: list[bytes] = []
    for part in unquote_to_bytes(raw.encode(errors="surrogateescape")).replace(b"\\", b"/").split(b"/"):
        if part == b"..":
            del kept[-1:]
        elif part not in (b"", b"."):
            kept.append(part)
    return "/" + "/".join(quote_from_bytes(part, safe=_IN_SEGMENTS) for part in kept)


def segment(name: str) -> str:
    return quote(name, safe="")


def _decoded(path: str) -> str:
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError:
        return path


# ---- requests

SMALL_BYTES = 4 << 10  # smaller bodies inflate in the loop, and need no check of bounds
CONNECTION = "tandem.connection"  # in the scope, under our own server


class ClientConnection(Protocol):
    broken: str  # why the rest of the body cannot be read; empty if it can

    @property
    def is_full(self) -> bool:
        """True while writes wait for the client."""

    @property
    def is_gone(self) -> bool:
        """True if the client has left."""


class BrokenBody(ApiError):
    """The rest of the body cannot be read, so the start of the next request is unknown."""

    def __init__(self, what: str) -> None:
        super().__init__(400, f"the body cannot be read: {what}")


class RequestKey(Generic[T]):
    """A typed name of a value that handlers keep in a request."""

    __slots__ = ("name",)

    def __init__(self, name: str, kind: type[T]) -> None:
        self.name = name


class HttpRequest(FastApiRequest):
    """A request: its path in one spelling, its body within limits, and values of handlers.

    `raw_path` is the path in one spelling with its escapes, `path` the same decoded (but for bytes
    that are no UTF-8), `target` the raw path and the query.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: RequestLimits, *, sends_at_once: bool = True
    ) -> None:
        """`sends_at_once`: no middleware is between `send` and the connection."""
        super().__init__(scope, receive, send)
        self.sends_at_once = sends_at_once
        self.limits = limits
        sent = scope["raw_path"].decode("utf-8", "surrogateescape")
        self.raw_path = plain_path(sent.removeprefix(scope.get("root_path", "")) or "/")  # below a mount
        self.path = _decoded(self.raw_path) if "%" in self.raw_path else self.raw_path
        self.connection: ClientConnection | None = scope.get(CONNECTION)
        self._own_headers: CIMultiDict[str] | None = None
        self._given: dict[RequestKey[Any], Any] = {}
        self._read_bytes: bytes | None = None

    @property
    def headers(self) -> CIMultiDict[str]:  # type: ignore[override]
        """The headers by name in any case; the first of equal names counts."""
        if self._own_headers is None:
            raw = self.scope["headers"]
            self._own_headers = CIMultiDict(
                [(n.decode("latin-1"), v.decode("utf-8", "surrogateescape")) for n, v in raw]
            )
        return self._own_headers

    @property
    def query(self) -> dict[str, str]:
        """The query's fields; the first of equal names counts."""
        pairs = parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return dict(reversed(pairs))

    @property
    def target(self) -> str:
        query = self.scope["query_string"].decode("latin-1")
        return f"{self.raw_path}?{query}" if query else self.raw_path

    @property
    def remote(self) -> str | None:
        """The client's address, None at a unix socket."""
        client = self.scope.get("client")
        return client[0] if client else None

    @property
    def has_body(self) -> bool:
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"

    def __getitem__(self, key: RequestKey[T]) -> T:  # type: ignore[override]
        return self._given[key]  # type: ignore[no-any-return]

    def __setitem__(self, key: RequestKey[T], value: T) -> None:
        self._given[key] = value

    def get(self, key: RequestKey[T], default: T | None = None) -> T | None:  # type: ignore[override]
        return self._given.get(key, default)

    __hash__ = object.__hash__

    async def read(self) -> bytes:
        """The inflated body. Raises ApiError(400, 408, 413, 415)."""
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
        if int(self.headers.get("content-length", "0")) > self.limits.max_body_bytes:
            raise self.limits.too_long()
        message = await self.receive() if self.has_body else _NO_BODY
        if message.get("more_body"):
            try:
                async with asyncio.timeout(self.limits.body_timeout_s):
                    return await self._rest(message)
            except TimeoutError:
                raise self.limits.too_slow() from None
        return self._piece(message, before=0)

    async def _rest(self, message: Message) -> bytes:
        pieces, size = [self._piece(message, before=0)], len(message["body"])
        while message.get("more_body"):
            message = await self.receive()
            pieces.append(self._piece(message, before=size))
            size += len(pieces[-1])
        return b"".join(pieces)

    def _piece(self, message: Message, *, before: int) -> bytes:
        if self.connection is not None and self.connection.broken:
            raise BrokenBody(self.connection.broken)
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client disconnected")
        piece: bytes = message.get("body", b"")
        if before + len(piece) > self.limits.max_body_bytes:
            raise self.limits.too_long()
        return piece


_NO_BODY: Message = {"type": "http.request", "body": b"", "more_body": False}


# ---- answers in pieces


def raw_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("utf-8", "surrogateescape")) for name, value in headers]


class StreamedResponse(Response):
    """An answer that its handler sends in pieces. `num_bytes`: written so far.

    The head goes with the first piece, as it would wait for the client's delayed ACK.
    """

    def __init__(self, request: HttpRequest, *, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.status_code = status
        self.num_bytes = 0
        self.raw_headers = raw_headers(headers)
        self._connection = request.connection if request.sends_at_once else None
        self._send = request._send
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do nothing: all is sent."""

    @property
    def is_full(self) -> bool:
        """True unless a write ends at once."""
        return self._connection is None or self._connection.is_full

    async def write(self, data: bytes) -> None:
        if not self._has_begun:
            await self._send(self._head())
        self.num_bytes += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        if not self._has_begun:
            await self._send(self._head())
        await self._send({"type": "http.response.body", "body": data})

    def write_now(self, data: bytes) -> None:
        """Write from a callback; the stream is not full."""
        if not self._has_begun:
            self._send_now(self._head())
        self.num_bytes += len(data)
        self._send_now({"type": "http.response.body", "body": data, "more_body": True})

    def _send_now(self, message: Message) -> None:
        sending: Any = self._send(message)
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()
        raise AssertionError("a stream that is not full waits for nothing")

    def _head(self) -> Message:
        self._has_begun = True
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}


class DirectWrites:
    """Writes the bytes of `take` at each `on_change`, while the task is in `wait`.

    The task resumes at the end, on errors, and if a write has to wait for the client.
    """

    def __init__(self, out: StreamedResponse, *, take: Callable[[], bytes], is_over: Callable[[], bool]) -> None:
        self._out = out
        self._take = take
        self._is_over = is_over
        self._stopped = Waiter()
        self._error: Exception | None = None

    async def wait(self) -> None:
        """Return when the task has to write or to end. Raises a callback's error."""
        await self._stopped.wait()
        if self._error is not None:
            raise self._error

    def on_change(self) -> None:
        if not self._stopped.is_waiting:
            return
        if self._is_over() or self._out.is_full:
            return self._stopped.wake()
        try:
            if data := self._take():
                self._out.write_now(data)
        except Exception as error:  # mostly of the client's connection
            self._error = error
            self._stopped.wake()


# ---- the application

Handler = Callable[[HttpRequest], Awaitable[Response]]


def asgi_app(handle: Handler, limits: RequestLimits, *, sends_at_once: bool = True) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await _other_than_http(scope, receive, send)
        request = HttpRequest(scope, receive, send, limits, sends_at_once=sends_at_once)
        try:
            response = await handle(request)
            await response(scope, receive, send)
        except (asyncio.CancelledError, ConnectionError):
            if request.connection is None or not request.connection.is_gone:
                raise

    return app


async def _other_than_http(scope: Scope, receive: Receive, send: Send) -> None:
    """Take part in the lifespan of another server's application; refuse websockets."""
    if scope["type"] != "lifespan":
        return await send({"type": "websocket.close", "code": 1003})
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
