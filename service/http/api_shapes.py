"""Errors and keep-alive bytes of each API, by path."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from service.http.errors import ApiError
from service.waiter import BODIES

# ---- JSON answers, and streams of events or lines (NDJSON).

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


# ---- api shapes

COMMENT = b": keep-alive\n\n"  # in server-sent events
PING = typed_event({"type": "ping"})  # Anthropic's

_TEXT = {"type": "string"}
_CODE = {"type": ["string", "integer", "null"]}


@dataclass(frozen=True, slots=True, eq=False)
class ApiShape:
    """Wire format of an API: an error's JSON, its form in a stream, and keep-alive bytes, if
    any.
    """

    body: Callable[[ApiError], dict[str, Any]]
    event: Callable[[dict[str, Any]], bytes]
    schema: dict[str, Any]
    beat: bytes = COMMENT

    def response(self, error: ApiError) -> web.Response:
        headers = None if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        body = msgspec.json.encode(self.body(error))
        return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)

    def last_event(self, error: ApiError) -> bytes:
        """Return an error as a stream's end, which clients' SDKs raise."""
        return self.event(self.body(error))


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _openai_body(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error; `code` defaults to the status, as in SGLang."""
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    if error.status >= 500:
        kind = "server_error"
    code = error.code or error.status
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": code}}


def _responses_event(body: dict[str, Any]) -> bytes:
    """Return an `error` event: flat as in OpenAI's reference, and nested for its SDKs."""
    error = body["error"]
    flat = {"code": str(error["code"]), "message": error["message"], "param": error["param"], "sequence_number": 0}
    return typed_event({"type": "error", **flat, **body})


# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_WORDS = {"context_length_exceeded": "prompt is too long: "}  # on which its clients shorten the prompt


def _anthropic_body(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    words = _ANTHROPIC_WORDS.get(error.code or "", "")
    return {"type": "error", "error": {"type": kind, "message": words + error.message, **_code_of(error)}}


def _ollama_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message, **_code_of(error)}


def _code_of(error: ApiError) -> dict[str, str]:
    """Return the code; routers recognize draining workers by it."""
    return {} if error.code is None else {"code": error.code}


OPENAI = ApiShape(
    _openai_body,
    event,
    _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _CODE})}
    ),
)
ANTHROPIC = ApiShape(
    _anthropic_body,
    typed_event,
    _object({"type": _TEXT, "error": _object({"type": _TEXT, "message": _TEXT}, code=_TEXT)}),
    beat=PING,
)
RESPONSES = ApiShape(_openai_body, _responses_event, OPENAI.schema)
OLLAMA = ApiShape(_ollama_body, line, _object({"error": _TEXT}, code=_TEXT), beat=b"")  # lines have no comments

_BY_PREFIX = (("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES), ("/api/", OLLAMA))


def shape_of(path: str) -> ApiShape:
    """Return the shape of a path, known or not."""
    return next((shape for prefix, shape in _BY_PREFIX if path.startswith(prefix)), OPENAI)
