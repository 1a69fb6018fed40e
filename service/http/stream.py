"""JSON answers, and streams of events or lines (NDJSON)."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from service.aside import BODIES

REQUEST_ID_HEADER = "X-Request-Id"
EVENTS_TYPE, LINES_TYPE = "text/event-stream", "application/x-ndjson"
STREAM_TYPES = (EVENTS_TYPE, LINES_TYPE)
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
SSE_HEADERS = {"Content-Type": f"{EVENTS_TYPE}; charset=utf-8", **_UNBUFFERED}
LINES_HEADERS = {"Content-Type": LINES_TYPE, **_UNBUFFERED}
DONE = b"data: [DONE]\n\n"
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
EXTRA_HEADERS: web.RequestKey[dict[str, str]] = web.RequestKey("extra_headers", dict)  # of every response
STREAMING: web.RequestKey[bool] = web.RequestKey("streaming", bool)  # headers are sent

_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
_encode = msgspec.json.Encoder().encode


class CoalescedResponse(web.StreamResponse):
    """Sends headers with the first bytes, to avoid a delayed ACK."""

    _send_headers_immediately = False


async def open_stream(request: web.BaseRequest, *, headers: Mapping[str, str], status: int = 200) -> CoalescedResponse:
    out = CoalescedResponse(status=status, headers=headers)
    out.headers.extend(request[EXTRA_HEADERS])
    request[STREAMING] = True
    await out.prepare(request)
    return out


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json", headers=headers)


async def json_rows(rows: Iterable[Any], *, size: int) -> list[msgspec.Raw]:
    """Encode rows, in a thread if large."""
    return await BODIES.run(lambda: [msgspec.Raw(_encode(row)) for row in rows], size=size)


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\n".encode() + event(value)


def line(value: Any) -> bytes:
    """Return a line of JSON; some readers split at Unicode line ends, so these are escaped."""
    text = _encode(value)
    for end, escape in _LINE_ENDS.items():
        text = text.replace(end, escape)
    return text + b"\n"
