"""The HTTP/1.1 client of generation requests, with pooled connections.

A general client costs four times as much (docs/reports/benchmarks.md), and may redirect, decompress
or resend.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from router.client.session import KEEPALIVE_S, READ_BUFFER_BYTES, keep_alive
from service.http.listening import why_unreachable
from service.http.resume import FRAMES_TYPE
from service.http.routes import STREAM_TYPES
from service.waiter import Waiter, end_tasks

MAX_HEAD_BYTES = 64 << 10  # of a response
MAX_ORIGINS = 4 * 4096  # cached parsed URLs


class UpstreamError(Exception):
    """`reason`: "refused" (not connected), "lost", "down" (given up here), "timeout"."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Upstream(Protocol):
    def get(self, url: str, path: str, *, headers: Mapping[str, str], timeout_s: float) -> "HttpReply": ...

    def post(self, url: str, path: str, *, headers: Mapping[str, str], body: bytes) -> "HttpReply":
        """`url` is scheme, host and port."""


class _Origin:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.ssl else 80)
        self.name = parts.netloc.rpartition("@")[2]
        self.free: list[_Connection] = []  # most recent last


class HttpUpstream:
    def __init__(self, *, connect_timeout_s: float, request_timeout_s: float, dead_timeout_s: float = 0.0) -> None:
        self._dead_timeout_s = dead_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self.origins: dict[str, _Origin] = {}
        self.connections: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None
        self._headers: Mapping[str, str] = {}  # of the latest request
        self._lines = ""

    def get(self, url: str, path: str, *, headers: Mapping[str, str], timeout_s: float) -> "HttpReply":
        origin = self._origin(url)
        head = f"GET {path} HTTP/1.1\r\nHost: {origin.name}\r\n{_lines(headers)}\r\n"
        return self._send(origin, HttpReply(self._loop, timeout_s=timeout_s), head.encode("utf-8", "surrogateescape"))

    def post(self, url: str, path: str, *, headers: Mapping[str, str], body: bytes) -> "HttpReply":
        origin = self._origin(url)
        if headers is not self._headers:  # both calls of a request share them: formatted once
            self._headers, self._lines = headers, _lines(headers)
        reply = HttpReply(self._loop, timeout_s=self._request_timeout_s)
        return self._send(origin, reply, _head(path, origin.name, self._lines, len(body)), body)

    def _send(self, origin: _Origin, reply: "HttpReply", head: bytes, body: bytes = b"") -> "HttpReply":
        connection = self._free(origin)
        if connection is not None:
            connection.send(reply, head, body)
        else:
            task = self._loop.create_task(self._connect_and_send(origin, reply, head, body))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            reply.end_connection = task.cancel
        return reply

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        await end_tasks(self._connecting)
        for connection in tuple(self.connections):
            connection.close()
        self.origins.clear()

    def _origin(self, url: str) -> _Origin:
        origin = self.origins.get(url)
        if origin is None:
            if len(self.origins) >= MAX_ORIGINS:  # mostly of gone workers; busy connections keep theirs
                for old in self.origins.values():
                    for connection in tuple(old.free):
                        connection.close()
                self.origins.clear()
            origin = self.origins[url] = _Origin(url)
        return origin

    def _free(self, origin: _Origin) -> "_Connection | None":
        """The latest idle connection that the worker will not close soon."""
        while origin.free:
            connection = origin.free.pop()
            if not connection.closed and self._loop.time() - connection.free_since_s < KEEPALIVE_S:
                return connection
            connection.close()
        return None

    async def _connect_and_send(self, origin: _Origin, reply: "HttpReply", head: bytes, body: bytes) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, origin), origin.host, origin.port, ssl=origin.ssl
                )
        except (OSError, TimeoutError) as err:
            detail = why_unreachable(err) or f"no connection in {self._connect_timeout_s:g} s"
            return reply.fail(UpstreamError("refused", detail))
        if reply.error is not None:  # ended during the connect, too late to cancel
            return connection.close()
        return connection.send(reply, head, body)

    def on_made(self, connection: "_Connection", opened: socket.socket | None) -> None:
        self.connections.add(connection)
        if opened is not None:
            keep_alive(opened, self._dead_timeout_s)

    def on_lost(self, connection: "_Connection") -> None:
        self.connections.discard(connection)
        if connection in connection.origin.free:
            connection.origin.free.remove(connection)

    def on_free(self, connection: "_Connection") -> None:
        connection.origin.free.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEPALIVE_S, self._close_old)

    def _close_old(self) -> None:
        old_s, self._sweep = self._loop.time() - KEEPALIVE_S, None
        free = [connection for origin in self.origins.values() for connection in origin.free]
        for connection in free:
            if connection.free_since_s <= old_s:
                connection.close()
        if any(origin.free for origin in self.origins.values()):
            self._sweep = self._loop.call_later(KEEPALIVE_S, self._close_old)


class HttpReply:
    """A response, from the sending of its request on, for one reader at a time.

    `status` is 0 before the head; header names are in lower case. A stream stops at a full buffer
    (`num_buffered`), other bodies are read whole. `received_s` is the loop time of the last bytes.
    `listener` is called at each change, `on_end` once; neither may raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.error: UpstreamError | None = None
        self.num_buffered = 0
        self.received_s = loop.time()
        self.listener: Callable[[], None] = nothing
        self.on_end: Callable[[], None] = nothing
        self.end_connection: Callable[[], object] = nothing
        self.resume: Callable[[], None] = nothing
        self._chunks: list[bytes] = []
        self._loop = loop
        self._waiter = Waiter()
        self._timer = loop.call_later(timeout_s, self._on_timeout)

    def take(self) -> bytes:
        chunks = self._chunks
        if not chunks:
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if self.num_buffered > READ_BUFFER_BYTES:
            self.resume()
        self.num_buffered = 0
        return data

    async def readany(self) -> bytes:
        """b"" at the end. Raises UpstreamError."""
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.complete:
                return b""
            await self._waiter.wait()
        return self.take()

    def close(self, error: UpstreamError | None = None) -> None:
        if not self.complete and self.error is None:
            end_connection = self.end_connection
            self.fail(error or UpstreamError("lost", "the request was ended here"))
            end_connection()

    def feed(self, data: bytes) -> bool:
        """Add bytes; return False to stop reading."""
        self._chunks.append(data)
        self.num_buffered += len(data)
        if self.num_buffered <= READ_BUFFER_BYTES:
            return True
        return not self.headers.get("content-type", "").startswith((*STREAM_TYPES, FRAMES_TYPE))

    def finish(self) -> None:
        self._timer.cancel()
        self.complete = True
        self._report_end()

    def fail(self, error: UpstreamError) -> None:
        """End it; earlier bytes stay readable."""
        if not self.complete and self.error is None:
            self._timer.cancel()
            self.error = error
            self._report_end()

    def _report_end(self) -> None:
        """Call and drop the listeners, whose cycle would keep bodies until garbage collection."""
        self.on_end()
        self.wake()
        self.listener = self.on_end = self.resume = self.end_connection = nothing

    def wake(self) -> None:
        self.received_s = self._loop.time()
        self._waiter.wake()
        self.listener()

    def _on_timeout(self) -> None:
        self.close(UpstreamError("timeout", "no answer in time (--request-timeout-secs)"))


def nothing() -> None:
    """Do nothing."""


class _Connection(asyncio.Protocol):
    def __init__(self, owner: HttpUpstream, origin: _Origin) -> None:
        self.origin = origin
        self.free_since_s = 0.0
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._reply: HttpReply | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._keep = False
        self._until_eof = False
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._owner.on_made(self, transport.get_extra_info("socket"))

    def send(self, reply: HttpReply, head: bytes, body: bytes) -> None:
        if self.closed:
            return reply.fail(UpstreamError("lost", "the worker closed the connection"))
        self._reply = reply
        reply.end_connection, reply.resume = self.close, self._resume
        if len(body) < READ_BUFFER_BYTES:
            return self._transport.write(head + body)
        self._transport.write(head)
        return self._transport.write(body)

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    def _resume(self) -> None:
        if not self.closed:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._reply is None:  # an answer to nothing
            return self.close()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            self._fail(f"the answer is not HTTP: {err}")
            return self.close()
        if self._reply is not None:
            self._reply.wake()
        return None

    def eof_received(self) -> bool:
        """End a response without length, fail others."""
        if self._until_eof:
            self._keep = False
            self.on_message_complete()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(str(exc or "") or "the worker closed the connection")
        self._owner.on_lost(self)

    def _fail(self, detail: str) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.fail(UpstreamError("lost", detail))

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
        if status < 200 or self._reply is None:  # an informational response
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
        reply, self._reply = self._reply, None
        self._until_eof = False
        if not self._keep or self.closed:
            self.close()
        else:
            self._resume()
            self.free_since_s = self._loop.time()
            self._owner.on_free(self)
        reply.finish()


def _lines(headers: Mapping[str, str]) -> str:
    """ValueError for a line break."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        raise ValueError("a header holds a line break")
    return text


def _head(path: str, host: str, lines: str, length: int) -> bytes:
    text = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n{lines}\r\n"
    return text.encode("utf-8", "surrogateescape")
