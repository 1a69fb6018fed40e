"""Errors and keep-alive bytes of each API, by path."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from service.http.errors import ApiError
from service.http.stream import event, line, typed_event

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
