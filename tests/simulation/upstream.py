"""The router's client over the simulated network: production replies, fed by simulated connections."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from router.upstream import HttpReply, UpstreamError
from tests.simulation.aio import VirtualLoop
from tests.simulation.http import Call, Head, Request, call
from tests.simulation.network import Network
from tests.simulation.world import Process


class SimulatedUpstream:
    """`router.upstream.Upstream`: a connection a request."""

    def __init__(self, *, network: Network, process: Process, aio: VirtualLoop, request_timeout_s: float) -> None:
        self._network = network
        self._process = process
        self._aio = aio
        self._request_timeout_s = request_timeout_s

    def post(self, url: str, path: str, *, headers: Mapping[str, str], body: bytes) -> HttpReply:
        reply = HttpReply(self._aio, timeout_s=self._request_timeout_s)  # type: ignore[arg-type]
        exchange = _Exchange(reply, self._aio)
        reply.end_connection = exchange.call.cancel
        address = urlsplit(url).netloc
        call(self._network, self._process, address, Request("POST", path, body, dict(headers)), exchange.call)
        return reply


class _Exchange:
    """Tells a reply what came over its connection."""

    def __init__(self, reply: HttpReply, aio: VirtualLoop) -> None:
        self._reply = reply
        self._aio = aio
        self.call = Call(self._on_head, self._on_chunk, self._on_end, self._on_lost)

    def _on_head(self, head: Head) -> None:
        self._reply.status, self._reply.headers = head.status, {"content-type": head.content_type}
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
