"""The HTTP/1.1 client that legs are sent with: kept connections to workers, one request on each at a time.

Owns sockets, and the parsing of answers (httptools: llhttp). Knows nothing of workers, roles or retries. A router spends
most of its time here, and a general client costs four times as much (docs/benchmarks.md); what this one leaves out is what
a router must not do: redirects, cookies, proxies, decompression, sending a request twice.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

READ_BUFFER_BYTES = 256 << 10  # that nobody took yet; more stops the reading: back-pressure to the worker
KEEPALIVE_S = 4.0  # below uvicorn's 5 s, so that a kept connection is rarely closed under a new request
MAX_HEAD_BYTES = 64 << 10  # of an answer
MAX_ORIGINS = 4 * 4096  # parsed URLs that are kept
STREAM_TYPE = "text/event-stream"


class UpstreamError(Exception):
    """No whole answer came. `reason`: "refused" (no connection was made), "lost" (it broke), or "timeout"."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Reply(Protocol):
    """A worker's answer, whose head has come. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]

    @property
    def ended(self) -> bool:
        """All of it was read."""

    async def readany(self) -> bytes:
        """What has come since the last time, at least a byte; nothing at its end. `UpstreamError` when it breaks off."""

    async def read(self) -> bytes:
        """All that is left. `UpstreamError`."""

    def close(self) -> None:
        """End it here; the connection is closed unless the answer has ended."""


class Upstream(Protocol):
    """Sends requests to workers."""

    async def post(self, url: str, path: str, *, headers: Mapping[str, str], body: bytes) -> Reply:
        """Send, and wait for the head of the answer. `url`: scheme, host and port. `UpstreamError`."""


class _Origin:
    """One worker's address and the connections to it that are free."""

    __slots__ = ("free", "host", "name", "port", "ssl")

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.ssl else 80)
        self.name = parts.netloc.rpartition("@")[2]
        self.free: list[_Connection] = []  # the last used one last


class HttpUpstream:
    """`Upstream` over sockets. `close()` ends every connection."""

    def __init__(self, *, connect_timeout_s: float, request_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._origins: dict[str, _Origin] = {}
        self._connections: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None

    async def post(self, url: str, path: str, *, headers: Mapping[str, str], body: bytes) -> "HttpReply":
        """As `Upstream.post`. The worker's answer has the whole of the request's timeout to come and to end."""
        origin = self._origin(url)
        head = _head(path, origin.name, headers, len(body))
        deadline_s = self._loop.time() + self._request_timeout_s
        connection = self._free(origin) or await self._connect(origin)
        reply = connection.send(head, body, deadline_s)
        try:
            await reply.head_came()
        except BaseException:
            reply.close()
            raise
        return reply

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._connections):
            connection.close()
        self._origins.clear()

    def _origin(self, url: str) -> _Origin:
        origin = self._origins.get(url)
        if origin is None:
            if len(self._origins) >= MAX_ORIGINS:  # of workers that left; busy connections know theirs
                for old in self._origins.values():
                    for connection in tuple(old.free):
                        connection.close()
                self._origins.clear()
            origin = self._origins[url] = _Origin(url)
        return origin

    def _free(self, origin: _Origin) -> "_Connection | None":
        """The connection that was used last, unless the worker may be about to close it."""
        while origin.free:
            connection = origin.free.pop()
            if not connection.closed and self._loop.time() - connection.free_since_s < KEEPALIVE_S:
                return connection
            connection.close()
        return None

    async def _connect(self, origin: _Origin) -> "_Connection":
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, origin), origin.host, origin.port, ssl=origin.ssl
                )
        except (OSError, TimeoutError) as err:
            detail = str(err) or f"no connection in {self._connect_timeout_s:g} s (--connect-timeout-s)"
            raise UpstreamError("refused", detail) from None
        return connection

    def on_made(self, connection: "_Connection") -> None:
        self._connections.add(connection)

    def on_lost(self, connection: "_Connection") -> None:
        self._connections.discard(connection)
        if connection in connection.origin.free:
            connection.origin.free.remove(connection)

    def on_free(self, connection: "_Connection") -> None:
        """An answer has ended, and the connection can take the next request."""
        connection.origin.free.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEPALIVE_S, self._close_old)

    def _close_old(self) -> None:
        """Connections that nobody used for a while do not stay open: their workers may be gone."""
        old_s, self._sweep = self._loop.time() - KEEPALIVE_S, None
        free = [connection for origin in self._origins.values() for connection in origin.free]
        for connection in free:
            if connection.free_since_s <= old_s:
                connection.close()
        if any(origin.free for origin in self._origins.values()):
            self._sweep = self._loop.call_later(KEEPALIVE_S, self._close_old)


class HttpReply:
    """`Reply` of one connection. One task at a time reads it."""

    __slots__ = ("_chunks", "_connection", "_error", "_loop", "_size", "_waiter", "complete", "headers", "status")

    def __init__(self, connection: "_Connection", loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._connection = connection
        self._loop = loop
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self.complete and not self._chunks

    async def head_came(self) -> None:
        """Until the head has come. `UpstreamError`."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def readany(self) -> bytes:
        """As `Reply.readany`."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            await self._wait()
        return self._take()

    async def read(self) -> bytes:
        """As `Reply.read`."""
        parts: list[bytes] = []
        while not self.complete:
            if self._error is not None:
                raise self._error
            await self._wait()
            parts.append(self._take())
        return b"".join(parts) + self._take()

    def close(self) -> None:
        """As `Reply.close`."""
        if not self.complete and self._error is None:
            self.fail(UpstreamError("lost", "the request was ended here"))
            self._connection.close()

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if self._size > READ_BUFFER_BYTES:
            self._connection.resume()
        self._size = 0
        return data

    async def _wait(self) -> None:
        assert self._waiter is None, "two tasks read one answer"
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Something came that a reader may wait for."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def feed(self, data: bytes) -> bool:
        """A piece of the body came; False: enough for now."""
        self._chunks.append(data)
        self._size += len(data)
        return self._size <= READ_BUFFER_BYTES

    def fail(self, error: UpstreamError) -> None:
        """Nothing more comes; what came before is still there to be read."""
        if not self.complete and self._error is None:
            self._error = error
            self.wake()


class _Connection(asyncio.Protocol):
    """One socket: free, or with one request on it. The methods `on_*` are called by its parser."""

    def __init__(self, owner: HttpUpstream, origin: _Origin) -> None:
        self.origin = origin
        self.free_since_s = 0.0
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._reply: HttpReply | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._keep = False
        self._until_eof = False
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._owner.on_made(self)

    def send(self, head: bytes, body: bytes, deadline_s: float) -> HttpReply:
        """Send a request; its answer is to end before `deadline_s` (the loop's time)."""
        reply = self._reply = HttpReply(self, self._loop)
        if self.closed:
            reply.fail(UpstreamError("lost", "the worker closed the connection"))
            return reply
        self._timer = self._loop.call_at(deadline_s, self._on_timeout)
        self._transport.write(head + body if len(body) < READ_BUFFER_BYTES else head)
        if len(body) >= READ_BUFFER_BYTES:
            self._transport.write(body)
        return reply

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    def resume(self) -> None:
        if not self.closed:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._reply is None:  # a free connection has nothing to say
            return self.close()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            self._end(UpstreamError("lost", f"the answer is not HTTP: {err}"))
            return self.close()
        if self._reply is not None:
            self._reply.wake()
        return None

    def eof_received(self) -> bool:
        """The worker closed: the end of an answer that says no length, else a broken one."""
        if self._until_eof:
            self._keep = False
            self.on_message_complete()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end(UpstreamError("lost", str(exc or "") or "the worker closed the connection"))
        self._owner.on_lost(self)

    def _on_timeout(self) -> None:
        self._end(UpstreamError("timeout", "no answer in time (--request-timeout-s)"))
        self.close()

    def _end(self, error: UpstreamError | None) -> None:
        """The request on this connection is over."""
        reply, self._reply = self._reply, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if reply is None:
            return
        if error is not None:
            return reply.fail(error)
        reply.complete = True
        reply.wake()
        return None

    def on_message_begin(self) -> None:
        if self._reply is None:  # an answer to nothing
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head of the answer is too long")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers, self._head_bytes = self._headers, {}, 0
        if status < 200 or self._reply is None:  # only says that an answer will come
            return
        self._reply.status, self._reply.headers = status, headers
        self._keep = self._parser.should_keep_alive()
        self._until_eof = "content-length" not in headers and "transfer-encoding" not in headers

    def on_body(self, data: bytes) -> None:
        if self._reply is not None and not self._reply.feed(data):
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._reply is None or not self._reply.status:
            return
        self._end(None)
        self._until_eof = False
        if not self._keep or self.closed:
            return self.close()
        self._transport.resume_reading()
        self.free_since_s = self._loop.time()
        self._owner.on_free(self)
        return None


def _head(path: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    """The head of a request. `ValueError` for a header that is more than one line."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a header holds a line break")
    return (text + "\r\n\r\n").encode("utf-8", "surrogateescape")
