"""Handlers by path and prefix, at a third of aiohttp's cost; shapes of answers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from fastapi import Response

from service.http.body import Body, ClosedBody, optional
from service.http.errors import ApiError, bad_field, decode_body, read_body
from service.http.request import Handler, HttpRequest, RequestKey, StreamedResponse
from service.security.keys import Access
from service.telemetry.context import MAX_ASKED, TracesQuery, query_error
from service.waiter import BODIES

# ---- JSON answers, and streams of events or lines (NDJSON).

REQUEST_ID_HEADER = "X-Request-Id"
EVENTS_TYPE, LINES_TYPE = "text/event-stream", "application/x-ndjson"
STREAM_TYPES = (EVENTS_TYPE, LINES_TYPE)
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
SSE_HEADERS = {"Content-Type": f"{EVENTS_TYPE}; charset=utf-8", **_UNBUFFERED}
LINES_HEADERS = {"Content-Type": LINES_TYPE, **_UNBUFFERED}
DONE = b"data: [DONE]\n\n"
REQUEST_ID: RequestKey[str] = RequestKey("request_id", str)
EXTRA_HEADERS: RequestKey[dict[str, str]] = RequestKey("extra_headers", dict)  # of every response
STREAMING: RequestKey[bool] = RequestKey("streaming", bool)  # headers are sent

_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
_encode = msgspec.json.Encoder().encode


def open_stream(request: HttpRequest, *, headers: Mapping[str, str], status: int = 200) -> StreamedResponse:
    request[STREAMING] = True
    return StreamedResponse(request, status=status, headers=chain(headers.items(), request[EXTRA_HEADERS].items()))


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, "application/json")


async def json_rows(rows: Iterable[Any], *, size: int) -> list[msgspec.Raw]:
    """Encode rows, in a thread if large."""
    return await BODIES.run(lambda: [msgspec.Raw(_encode(row)) for row in rows], size=size)


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\n".encode() + event(value)


def line(value: Any) -> bytes:
    """A line of JSON; some readers split at Unicode line ends, so these are escaped."""
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
    """An API's wire format: an error's JSON, its form in a stream, keep-alive bytes, if any."""

    body: Callable[[ApiError], dict[str, Any]]
    event: Callable[[dict[str, Any]], bytes]
    schema: dict[str, Any]
    beat: bytes = COMMENT

    def response(self, error: ApiError) -> Response:
        headers = None if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        body = msgspec.json.encode(self.body(error))
        return Response(body, error.status, headers, "application/json")

    def last_event(self, error: ApiError) -> bytes:
        """An error as a stream's end, which clients' SDKs raise."""
        return self.event(self.body(error))


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _openai_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's error; `code` defaults to the status, as in SGLang."""
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    if error.status >= 500:
        kind = "server_error"
    code = error.code or error.status
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": code}}


def _responses_event(body: dict[str, Any]) -> bytes:
    """An `error` event: flat as in OpenAI's reference, and nested for its SDKs."""
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
    """The code; routers recognize draining workers by it."""
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
    return next((shape for prefix, shape in _BY_PREFIX if path.startswith(prefix)), OPENAI)


# ---- SageMaker's POST /invocations, for any API. Pure.

INVOCATIONS = "/invocations"


class InvocationBody(Body):
    """Fields that decide the API, in order. `input` is an embedding's, as in vLLM."""

    messages: Any = optional("As in /v1/chat/completions, which then answers.", [{"role": "user", "content": "Hello"}])
    prompt: Any = optional("As in /v1/completions, which then answers.", "The capital of France is")
    input: Any = optional("As in /v1/embeddings, which then answers.", "The weather is nice.")
    text: Any = optional("As in /generate, which then answers.", "The capital of France is")
    input_ids: Any = optional("As in /generate, which then answers.", [1, 450, 7483])


_PATHS: Mapping[str, str] = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "text": "/generate",
    "input_ids": "/generate",
}


def invoked_path(body: bytes) -> str:
    """The body's path. Raises ApiError(400)."""
    fields = decode_body(body, dict[str, msgspec.Raw])
    for field, path in _PATHS.items():
        if field in fields:
            return path
    raise ApiError(400, f"the body fits no API: it needs one of {', '.join(_PATHS)}", code="unknown_body")


# ---- POST /traces, of workers and routers


class TracesBody(ClosedBody):
    ids: list[str] | None = optional(f"Ids of requests, 1 to {MAX_ASKED}. Give this or last.", ["my-request-1"])
    last: int | None = optional(f"Number of the last requests, 1 to {MAX_ASKED}. Give this or ids.", 10)


def read_query(data: bytes) -> TracesQuery:
    """Raises ApiError(400)."""
    body = read_body(data, TracesBody)
    query = TracesQuery(ids=body.ids, last=body.last)
    if (wrong := query_error(query)) is not None:
        field, _, message = wrong.partition(": ")
        raise bad_field(field, message)
    return query


# ---- definitions of routes


class Tag(NamedTuple):
    """A group of routes in the documentation."""

    name: str
    description: str


@dataclass(frozen=True)
class HttpRoute:
    """`need`: the key that it needs. `is_polled`: successes are not logged. `about`: summary and
    description; the handler's docstring if empty. `is_alias`: not documented. `streams`: content
    type of a stream. `plain_text`, `empty`: kinds of answers. `starts`: work continues after a 202.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    body_required: bool = True
    need: Access = Access.USER
    is_polled: bool = False
    is_alias: bool = False
    about: str = ""
    streams: str = ""
    plain_text: bool = False
    empty: bool = False
    starts: bool = False


get, post, put, delete = (partial(HttpRoute, method) for method in ("GET", "POST", "PUT", "DELETE"))

# ---- models with special heads


# 404, as OpenAI's SDK would retry a 501.
UNSERVED = {
    "/pooling": "needs a model with a pooling head; the models here generate text. Instead: /v1/embeddings makes "
    "vectors to compare, and so does /encode"
}


async def refuse(request: HttpRequest) -> Response:
    path = request.path.rstrip("/")
    raise ApiError(404, f"{path} {UNSERVED[path]}", code="model_has_no_head")


# ---- routes


@dataclass(frozen=True, slots=True)
class MatchedRoute:
    """`path` as registered, empty if unknown."""

    path: str
    handler: Handler
    errors: ApiShape


ROUTE: RequestKey[MatchedRoute] = RequestKey("route", MatchedRoute)


class Routes:
    """Routes by path and method; "/{name}" matches any text up to what follows."""

    def __init__(self, routes: Iterable[HttpRoute]) -> None:
        self._exact: dict[str, dict[str, MatchedRoute]] = {}
        below: dict[tuple[str, str], dict[str, MatchedRoute]] = {}  # "/v1/models/", "" -> method -> route
        for route in routes:
            head, brace, rest = route.path.partition("{")
            ends = (head, rest.partition("}")[2])
            methods = below.setdefault(ends, {}) if brace else self._exact.setdefault(head, {})
            assert route.method not in methods, (route.method, route.path)
            methods[route.method] = MatchedRoute(route.path, route.handler, shape_of(route.path))
            if route.method == "GET":
                methods["HEAD"] = methods["GET"]
        self._below = sorted(below.items(), key=lambda item: -len(item[0][1]))  # paths that continue after {name} first

    def find(self, method: str, path: str) -> MatchedRoute:
        """The route, or one that raises HTTPNotFound or HTTPMethodNotAllowed."""
        methods = self._exact.get(path) or self._methods_below(path)
        if methods is None:
            return MatchedRoute("", _not_found, shape_of(path))
        route = methods.get(method)
        return route if route is not None else _not_allowed(method, methods)

    def paths(self) -> dict[str, set[str]]:
        """Paths with methods, without HEAD."""
        found: dict[str, set[str]] = {}
        for methods in (*self._exact.values(), *(below for _, below in self._below)):
            for method, route in methods.items():
                if method != "HEAD":
                    found.setdefault(route.path, set()).add(method)
        return found

    def of(self, request: HttpRequest) -> MatchedRoute:
        route = request.get(ROUTE)
        if route is None:
            route = request[ROUTE] = self.find(request.method, request.path)
        return route

    def _methods_below(self, path: str) -> dict[str, MatchedRoute] | None:
        for (head, tail), methods in self._below:
            if path.startswith(head) and path.endswith(tail) and len(path) > len(head) + len(tail):
                return methods
        return None


def errors_of(request: HttpRequest) -> ApiShape:
    """The shape of errors, OpenAI's before routing."""
    route = request.get(ROUTE)
    return OPENAI if route is None else route.errors


def no_such_path(request: HttpRequest) -> ApiError:
    return ApiError(404, f"there is no {request.path} here", code="not_found")


async def _not_found(request: HttpRequest) -> Response:
    raise no_such_path(request)


def _not_allowed(method: str, methods: dict[str, MatchedRoute]) -> MatchedRoute:
    known = next(iter(methods.values()))

    async def refuse(request: HttpRequest) -> Response:
        message = f"{request.path} does not take {method}"
        response = known.errors.response(ApiError(405, message, code="method_not_allowed"))
        response.headers["Allow"] = ",".join(sorted(methods))
        return response

    return MatchedRoute(known.path, refuse, known.errors)
