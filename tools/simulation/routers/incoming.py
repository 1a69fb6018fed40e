"""Requests of simulated clients, as the dispatcher and `web.StreamResponse` see them."""

from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from service.http.routes import REQUEST_ID_HEADER
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Reply, Request


class IncomingRequest(dict[Any, Any]):
    """What the dispatcher and `web.StreamResponse` use of a `web.Request`."""

    method = "POST"
    version = HttpVersion11
    keep_alive = True
    body_exists = True
    protocol = SimpleNamespace(is_full=False)

    def __init__(self, loop: VirtualLoop, request: Request, reply: Reply, request_id: str) -> None:
        super().__init__()
        self.path = request.path
        self.headers = CIMultiDict(
            {REQUEST_ID_HEADER: request_id, "Content-Type": "application/json", **request.headers}
        )
        self._body = request.body
        self.writer = self._payload_writer = _Writer(reply)

    async def read(self) -> bytes:
        return self._body

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """No application, no signals."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class _Writer:
    """`AbstractStreamWriter` to the client."""

    buffer_size = output_size = 0
    length: int | None = None

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def enable_chunking(self) -> None:
        """Parts are parts here anyway."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        self._reply.head(int(status_line.split()[1]), headers.get("Content-Type", ""))

    def send_headers(self) -> None:
        """Sent by `write_headers`."""

    async def write(self, chunk: bytes) -> None:
        if not self._reply.connected:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        self.output_size += len(chunk)
        self._reply.chunk(bytes(chunk))

    async def write_eof(self, chunk: bytes = b"") -> None:
        if chunk:
            await self.write(chunk)
        self._reply.finish()
