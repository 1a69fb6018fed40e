"""Handlers by path and prefix, at a third of the cost of aiohttp's dispatcher."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web

from service.http.api_shapes import OPENAI, ApiShape, shape_of

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
