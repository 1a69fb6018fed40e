"""Handlers by path and prefix, at a third of the cost of aiohttp's dispatcher."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

import msgspec
from aiohttp import web

from service.http.api_shapes import OPENAI, ApiShape, shape_of
from service.http.errors import ApiError, decode_body

# ---- Normalization of request paths before any rule. Pure.

# Matches paths that may not be normal: escapes, or bytes that need one, backslashes, empty
# segments, dots, a trailing slash.
_ODD = re.compile(r"[^!-~]|%|\\|//|/\.|./$")
_IN_SEGMENTS = "!$&'()*+,;=:@~"  # allowed in a path by RFC 3986, beyond those that quote() leaves


def plain_path(raw: str) -> str:
    """Decode escapes once; drop dot and empty segments and a trailing slash.

    Encoded slashes and backslashes count as slashes, so a rule holds for each spelling, also at a
    server that gets the path passed on. Bytes that are not UTF-8 stay.
    """
    if not raw.startswith("/") or not _ODD.search(raw):
        return raw
    kept: list[bytes] = []
    for part in unquote_to_bytes(raw.encode(errors="surrogateescape")).replace(b"\\", b"/").split(b"/"):
        if part == b"..":
            del kept[-1:]
        elif part not in (b"", b"."):
            kept.append(part)
    return "/" + "/".join(quote_from_bytes(part, safe=_IN_SEGMENTS) for part in kept)


def segment(name: str) -> str:
    return quote(name, safe="")


# ---- SageMaker's POST /invocations, for any API. Pure.

INVOCATIONS = "/invocations"


class InvocationBody(msgspec.Struct, kw_only=True):
    """Fields that decide the API, in order. `input` is an embedding's, as in vLLM."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    text: Any = None
    input_ids: Any = None


_PATHS: Mapping[str, str] = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "text": "/generate",
    "input_ids": "/generate",
}


def invoked_path(body: bytes) -> str:
    """Return the body's path. Raises ApiError(400)."""
    fields = decode_body(body, dict[str, msgspec.Raw])
    for field, path in _PATHS.items():
        if field in fields:
            return path
    raise ApiError(400, f"the body fits no API: it needs one of {', '.join(_PATHS)}", code="unknown_body")


# ---- models with special heads

EMBEDDINGS = "/v1/embeddings makes vectors to compare"


@dataclass(frozen=True, slots=True)
class ModelHead:
    """Routes that need a model with a special head, and alternatives.

    404, as OpenAI's SDK would retry a 501.
    """

    needs: str
    instead: str


_POOLING = ModelHead("a model with a pooling head", f"{EMBEDDINGS}, and so does /encode")
UNSERVED: Mapping[str, ModelHead] = {
    "/pooling": _POOLING,
}


async def refuse(request: web.BaseRequest) -> web.StreamResponse:
    path = request.path.rstrip("/")
    head = UNSERVED[path]
    message = f"{path} needs {head.needs}; the models here generate text. Instead: {head.instead}"
    raise ApiError(404, message, code="model_has_no_head")


def unserved_routes() -> list[web.RouteDef]:
    return [web.post(path, refuse) for path in UNSERVED]


# ---- routes

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A route. `path` as registered, empty if unknown."""

    path: str
    handler: Handler
    errors: ApiShape


ROUTE: web.RequestKey[HttpRoute] = web.RequestKey("route", HttpRoute)


class Routes:
    """Routes by path and method; "/{name}" matches any text up to what follows."""

    def __init__(self, routes: Iterable[web.RouteDef]) -> None:
        self._exact: dict[str, dict[str, HttpRoute]] = {}
        below: dict[tuple[str, str], dict[str, HttpRoute]] = {}  # "/v1/models/", "" -> method -> route
        for route in routes:
            head, brace, rest = route.path.partition("{")
            ends = (head, rest.partition("}")[2])
            methods = below.setdefault(ends, {}) if brace else self._exact.setdefault(head, {})
            assert route.method not in methods, (route.method, route.path)
            methods[route.method] = HttpRoute(route.path, route.handler, shape_of(route.path))  # type: ignore[arg-type]
            if route.method == "GET":
                methods["HEAD"] = methods["GET"]
        self._below = sorted(below.items(), key=lambda item: -len(item[0][1]))  # paths that continue after {name} first

    def find(self, method: str, path: str) -> HttpRoute:
        """Return the route, or one that raises HTTPNotFound or HTTPMethodNotAllowed."""
        methods = self._exact.get(path) or self._methods_below(path)
        if methods is None:
            return HttpRoute("", _not_found, shape_of(path))
        route = methods.get(method)
        return route if route is not None else _not_allowed(method, methods)

    def paths(self) -> dict[str, set[str]]:
        """Return paths with methods, without HEAD."""
        found: dict[str, set[str]] = {}
        for methods in (*self._exact.values(), *(below for _, below in self._below)):
            for method, route in methods.items():
                if method != "HEAD":
                    found.setdefault(route.path, set()).add(method)
        return found

    def of(self, request: web.BaseRequest) -> HttpRoute:
        route = request.get(ROUTE)
        if route is None:
            route = request[ROUTE] = self.find(request.method, request.path)
        return route

    def _methods_below(self, path: str) -> dict[str, HttpRoute] | None:
        for (head, tail), methods in self._below:
            if path.startswith(head) and path.endswith(tail) and len(path) > len(head) + len(tail):
                return methods
        return None


def errors_of(request: web.BaseRequest) -> ApiShape:
    """Return the shape of errors, OpenAI's before routing."""
    route = request.get(ROUTE)
    return OPENAI if route is None else route.errors


async def _not_found(request: web.BaseRequest) -> web.StreamResponse:
    raise web.HTTPNotFound


def _not_allowed(method: str, methods: dict[str, HttpRoute]) -> HttpRoute:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPMethodNotAllowed(method, sorted(methods))

    known = next(iter(methods.values()))
    return HttpRoute(known.path, refuse, known.errors)
