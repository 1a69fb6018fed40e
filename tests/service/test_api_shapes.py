"""Each API's errors in its own shape, by the route: as an answer, and at the end of a stream."""

import json
from typing import Any

import pytest
from aiohttp import web

from engine.frontend.errors import from_finish
from engine.messages import FinishReason
from router.pool.reports import parse_error, reports_draining, reports_request_failed
from service.http.errors import ApiError
from service.http.request import Handler
from service.http.routes import ANTHROPIC, OLLAMA, OPENAI, ApiShape, Routes, shape_of

REFUSED = ApiError(400, 'n: "0" is\nwrong', field="n")
TOO_LONG = ApiError(400, "it is", code="context_length_exceeded")
DRAINING = ApiError(503, "it drains", code="draining", retry_after_s=1)

BODIES: list[tuple[ApiShape, ApiError, dict[str, Any]]] = [
    (OPENAI, REFUSED, {"message": REFUSED.message, "type": "invalid_request_error", "param": "n", "code": 400}),
    (OPENAI, DRAINING, {"message": "it drains", "type": "server_error", "param": None, "code": "draining"}),
    (ANTHROPIC, REFUSED, {"type": "invalid_request_error", "message": REFUSED.message}),
    (
        ANTHROPIC,
        TOO_LONG,
        {"type": "invalid_request_error", "message": "prompt is too long: it is", "code": "context_length_exceeded"},
    ),
    (ANTHROPIC, DRAINING, {"type": "overloaded_error", "message": "it drains", "code": "draining"}),
]


@pytest.mark.parametrize(("shape", "error", "inside"), BODIES)
def test_bodies(shape: ApiShape, error: ApiError, inside: dict[str, Any]) -> None:
    around = {"type": "error"} if shape is ANTHROPIC else {}
    assert shape.body(error) == {**around, "error": inside}


def test_the_body_of_ollama() -> None:
    assert OLLAMA.body(REFUSED) == {"error": REFUSED.message}
    assert OLLAMA.body(DRAINING) == {"error": "it drains", "code": "draining"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_types(status: int, kind: str) -> None:
    assert ANTHROPIC.body(ApiError(status, "m"))["error"]["type"] == kind


@pytest.mark.parametrize(
    ("shape", "head", "end"),
    [(OPENAI, b"data: ", b"\n\n"), (ANTHROPIC, b"event: error\ndata: ", b"\n\n"), (OLLAMA, b"", b"\n")],
)
def test_the_last_event_is_one_whole_event(shape: ApiShape, head: bytes, end: bytes) -> None:
    event = shape.last_event(REFUSED)
    assert event.startswith(head) and event.endswith(end)
    text = event.removeprefix(head).removesuffix(end)
    assert b"\n" not in text and json.loads(text) == shape.body(REFUSED)


@pytest.mark.parametrize("shape", [OPENAI, ANTHROPIC, OLLAMA])
def test_a_router_reads_every_shape(shape: ApiShape) -> None:
    body = shape.response(DRAINING)
    assert isinstance(body.body, bytes) and reports_draining(body.body) and parse_error(body.body) == "it drains"
    assert body.status_code == 503 and body.headers["Retry-After"] == "1"
    other = json.dumps(shape.body(REFUSED)).encode()
    assert not reports_draining(other) and parse_error(other) == REFUSED.message
    own = from_finish(FinishReason(kind="abort", message="NaN", status=500, own=True))
    assert reports_request_failed(json.dumps(shape.body(own)).encode()) and not reports_request_failed(other)
    assert not reports_request_failed(json.dumps(shape.body(ApiError(500, "the transfer broke"))).encode())


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages/count_tokens", ANTHROPIC),
        ("/v1/messages/nowhere", ANTHROPIC),
        ("/api/chat", OLLAMA),
        ("/api/nowhere", OLLAMA),
        ("/v1/chat/completions", OPENAI),
        ("/v1/models/api/chat", OPENAI),
        ("/nowhere", OPENAI),
    ],
)
def test_the_route_says_the_shape(path: str, shape: ApiShape) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    handlers: dict[str, Handler] = dict.fromkeys(("/v1/messages", "/api/chat", "/v1/chat/completions"), handler)
    routes = Routes(
        [web.post(path, handler) for path, handler in handlers.items()] + [web.get("/v1/models/{m}", handler)]
    )
    assert shape_of(path) is shape
    assert {routes.find(method, path).errors for method in ("GET", "POST", "DELETE")} == {shape}
