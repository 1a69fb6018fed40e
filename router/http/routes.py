"""Which handler serves a path: a table of exact paths, and of prefixes. The HTTP library's own dispatcher costs three times as much.

Knows no handlers; every route is an aiohttp `RouteDef`.
"""

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Routes:
    """Routes by path and method. A path that ends in "/{name}" takes anything there, but nothing less."""

    def __init__(self, routes: Iterable[web.RouteDef]) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._below: dict[str, dict[str, Handler]] = {}  # "/v1/models/" -> method -> handler
        for route in routes:
            head, brace, _ = route.path.partition("{")
            methods = (self._below if brace else self._exact).setdefault(head, {})
            assert route.method not in methods, (route.method, route.path)
            methods[route.method] = route.handler  # type: ignore[assignment]
            if route.method == "GET":
                methods["HEAD"] = methods["GET"]

    def handler(self, method: str, path: str) -> Handler:
        """The handler; one that raises `HTTPNotFound` or `HTTPMethodNotAllowed` where there is none."""
        methods = self._exact.get(path) or self._methods_below(path)
        if methods is None:
            return _not_found
        handler = methods.get(method)
        return handler if handler is not None else _not_allowed(method, sorted(methods))

    def _methods_below(self, path: str) -> dict[str, Handler] | None:
        for head, methods in self._below.items():
            if path.startswith(head) and len(path) > len(head):
                return methods
        return None


async def _not_found(request: web.BaseRequest) -> web.StreamResponse:
    raise web.HTTPNotFound


def _not_allowed(method: str, allowed: list[str]) -> Handler:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPMethodNotAllowed(method, allowed)

    return refuse
