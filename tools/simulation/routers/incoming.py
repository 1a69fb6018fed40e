"""Requests of simulated clients, as ASGI hands them to the router."""

from starlette.types import Message

import service.http.request as served
from service.http.errors import RequestLimits
from service.http.request import CONNECTION
from service.http.routes import REQUEST_ID_HEADER
from tools.simulation.http import Reply, Request

LIMITS = RequestLimits(max_body_bytes=1 << 30)


class _Connection:
    """The client's; it reads at once."""

    broken = ""
    is_full = False

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    @property
    def is_gone(self) -> bool:
        return not self._reply.connected


def incoming(request: Request, reply: Reply, request_id: str) -> served.HttpRequest:
    async def receive() -> Message:
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        if not reply.connected:
            raise ConnectionResetError("the client has left")
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            return reply.head(message["status"], kind.decode())
        if message["body"]:
            reply.chunk(message["body"])
        if not message.get("more_body"):
            reply.finish()

    headers = {REQUEST_ID_HEADER: request_id, "Content-Type": "application/json", **request.headers}
    headers["Content-Length"] = str(len(request.body))
    scope = {
        "type": "http",
        "method": "POST",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": b"",
        "headers": served.raw_headers(headers.items()),
        CONNECTION: _Connection(reply),
    }
    return served.HttpRequest(scope, receive, send, LIMITS)
