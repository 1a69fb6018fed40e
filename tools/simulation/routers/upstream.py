"""The router's client over the simulated network: production replies, fed by simulated connections."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import ClientTimeout
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict
from yarl import URL

from router.client.upstream import HttpReply, UpstreamError
from service.http.guard import LEAST_S, TIMEOUT_HEADER
from service.http.resume import RESUME_HEADER
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Call, Head, Request, call
from tools.simulation.network import Network
from tools.simulation.world import Process, Violation

DEADLINE_SLACK_S = 0.002  # headers are rounded to milliseconds


class SimulatedUpstream:
    """`router.upstream.Upstream`: a connection a request."""

    def __init__(self, *, network: Network, process: Process, aio: VirtualLoop, request_timeout_s: float) -> None:
        self._network = network
        self._process = process
        self._aio = aio
        self._request_timeout_s = request_timeout_s
        self._deadlines: dict[str, float] = {}  # of a request, by its name
        self._rests: Counter[str] = Counter()  # attempts to go on with it

    def note(self, name: str, request: Request) -> None:
        """A client's request has come: what it said of its time is remembered."""
        if TIMEOUT_HEADER in request.headers:
            self._deadlines[name] = self._process.clock() + float(request.headers[TIMEOUT_HEADER])

    def get(self, url: str, path: str, *, headers: Mapping[str, str], timeout_s: float) -> HttpReply:
        return self.send(url, Request("GET", path, b"", dict(headers)), timeout_s=timeout_s)

    def post(self, url: str, path: str, *, headers: Mapping[str, str], body: bytes) -> HttpReply:
        self._check_deadline(headers)
        if RESUME_HEADER in headers and urlsplit(url).netloc.startswith("d"):
            self._rests[headers["X-Request-Id"]] += 1
            if self._rests[headers["X-Request-Id"]] == 2:
                self._process.world.seen["answers that go on twice"] += 1
        return self.send(url, Request("POST", path, body, dict(headers)), timeout_s=self._request_timeout_s)

    def send(self, url: str, request: Request, *, timeout_s: float) -> HttpReply:
        reply = HttpReply(self._aio, timeout_s=timeout_s)  # type: ignore[arg-type]
        exchange = _Exchange(reply, self._aio)
        reply.end_connection = exchange.call.cancel
        call(self._network, self._process, urlsplit(url).netloc, request, exchange.call)
        return reply

    def _check_deadline(self, headers: Mapping[str, str]) -> None:
        """No attempt is told that there is more time than is left."""
        deadline_s = self._deadlines.get(headers["X-Request-Id"])
        if deadline_s is None:
            return
        left_s = max(LEAST_S, deadline_s - self._process.clock())
        if float(headers[TIMEOUT_HEADER]) > left_s + DEADLINE_SLACK_S:
            raise Violation(f"an attempt may take {headers[TIMEOUT_HEADER]} s, {left_s:.3f} s are left")


class SimulatedSession:
    """`aiohttp.ClientSession` over the same connections, as far as routers use it."""

    def __init__(self, upstream: SimulatedUpstream) -> None:
        self._upstream = upstream

    def get(self, url: str, *, timeout: ClientTimeout, **_: Any) -> "AbstractAsyncContextManager[_Answer]":
        return self._exchange(URL(url), Request("GET", URL(url).path), timeout)

    def request(
        self, method: str, url: str, *, data: bytes | None, headers: Any, timeout: ClientTimeout, **_: Any
    ) -> "AbstractAsyncContextManager[_Answer]":
        return self._exchange(URL(url), Request(method, URL(url).path, data or b"", dict(headers)), timeout)

    @asynccontextmanager
    async def _exchange(self, url: URL, request: Request, timeout: ClientTimeout) -> AsyncIterator["_Answer"]:
        at = f"http://{url.host}:{url.port}"
        with closing(self._upstream.send(at, request, timeout_s=timeout.total or 60.0)) as reply:
            answer = _Answer(reply)
            await answer.begin()
            yield answer


class _Answer:
    """`aiohttp.ClientResponse`, and its `content`."""

    def __init__(self, reply: HttpReply) -> None:
        self._reply = reply
        self.content = self
        self.status = 0
        self.headers: Mapping[str, str] = {}

    async def begin(self) -> None:
        """Wait for the head."""
        while not self._reply.status:
            if self._reply.error is not None:
                raise _as_of_aiohttp(self._reply.error)
            await self._reply._waiter.wait()
        self.status, self.headers = self._reply.status, CIMultiDict(self._reply.headers)

    async def iter_any(self) -> AsyncIterator[bytes]:
        try:
            while data := await self._reply.readany():
                yield data
        except UpstreamError as error:
            raise _as_of_aiohttp(error) from error

    async def read(self) -> bytes:
        return b"".join([data async for data in self.iter_any()])


def _as_of_aiohttp(error: UpstreamError) -> Exception:
    if error.reason == "timeout":
        return TimeoutError()
    if error.reason == "refused":
        key = ConnectionKey("", 0, False, True, None, None, None)
        return aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "Connect call failed"))
    return aiohttp.ServerDisconnectedError()


class _Exchange:
    """Tells a reply what came over its connection."""

    def __init__(self, reply: HttpReply, aio: VirtualLoop) -> None:
        self._reply = reply
        self._aio = aio
        self.call = Call(self._on_head, self._on_chunk, self._on_end, self._on_lost)

    def _on_head(self, head: Head) -> None:
        again = {"retry-after": head.retry_after} if head.retry_after else {}
        self._reply.status, self._reply.headers = head.status, {"content-type": head.content_type, **again}
        self._aio.run(self._reply.wake)

    def _on_chunk(self, data: bytes) -> None:
        self._reply.feed(data)
        self._aio.run(self._reply.wake)

    def _on_end(self) -> None:
        self._aio.run(self._reply.finish)

    def _on_lost(self, reason: str) -> None:
        refused = reason == "refused"
        error = UpstreamError(reason, "nothing listens" if refused else "the connection was lost")
        self._aio.run(lambda: self._reply.fail(error))
