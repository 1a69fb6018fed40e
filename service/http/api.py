"""An API as a FastAPI router, and the application of a server.

FastAPI documents the routes, mounts them into other applications, and takes middleware. Requests
find their handler in a table of paths (routes.py), as a scan of a hundred patterns would cost more
than the rest of the router.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI, Response
from fastapi import Request as FastApiRequest
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp

from service.flags import ConfigError, installed_version
from service.http.body import Body, schemas_of
from service.http.errors import RequestLimits
from service.http.openapi import SCHEMAS, operation
from service.http.request import Handler, HttpRequest, asgi_app
from service.http.routes import HttpRoute, Tag

H = TypeVar("H", bound=Handler)

OPENAPI_PATH = "/openapi.json"


class ApiRouter(APIRouter):
    """Routes under one tag of the documentation."""

    def __init__(self, tag: Tag, routes: Iterable[HttpRoute] = ()) -> None:
        super().__init__(tags=[tag.name])
        self.tag = tag
        self.table: list[HttpRoute] = []
        for route in routes:
            self.add(route)

    def on(
        self, kind: Callable[..., HttpRoute], path: str, body: type[Body] | None = None, **fields: Any
    ) -> Callable[[H], H]:
        """Decorate the handler of a route."""

        def decorate(handler: H) -> H:
            self.add(kind(path, handler, body, **fields))
            return handler

        return decorate

    def add(self, route: HttpRoute) -> None:
        self.table.append(route)
        if route.is_alias:
            return
        summary, description = texts_of(route)
        self.add_api_route(
            route.path,
            _endpoint(route.handler),
            methods=[route.method],
            summary=summary,
            description=description,
            response_class=Response,
            openapi_extra=operation(route),
            operation_id=f"{route.method.lower()} {route.path}",
        )


def texts_of(route: HttpRoute) -> tuple[str, str]:
    """Return summary and description, by default of the handler's docstring."""
    text = route.about or inspect.getdoc(route.handler) or ""
    summary, _, description = text.partition("\n")
    return summary.rstrip("."), description.strip()


def _endpoint(handler: Handler) -> Callable[[FastApiRequest], Awaitable[Response]]:
    """Return an endpoint whose parameters FastAPI reads."""

    async def endpoint(request: FastApiRequest) -> Response:
        assert isinstance(request, HttpRequest)
        return await handler(request)

    return endpoint


class Application(FastAPI):
    """A server's application. `handle` answers; `apis` are documented in their order."""

    def __init__(self, title: str, apis: Sequence[ApiRouter], *, handle: Handler, limits: RequestLimits) -> None:
        super().__init__(
            title=title,
            version=installed_version(),
            openapi_url=None,
            telemetry={"tracing": False, "metrics": False, "logs": False},  # ours does it
        )
        for api in apis:
            self.include_router(api)
        self._apis, self._handle, self._limits = apis, handle, limits

    def build_middleware_stack(self) -> ASGIApp:
        """Leave out FastAPI's own layers: `handle` answers errors and unknown paths."""
        app = asgi_app(self._handle, self._limits, sends_at_once=not self.user_middleware)
        for middleware, args, options in reversed(self.user_middleware):
            app = middleware(app, *args, **options)
        return app

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = document(self._apis, title=self.title)
        return self.openapi_schema


def document(apis: Sequence[ApiRouter], *, title: str) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of all bodies."""
    tags = [tag._asdict() for tag in dict.fromkeys(api.tag for api in apis)]
    routes = [route for api in apis for route in api.routes]
    made = get_openapi(title=title, version=installed_version(), openapi_version="3.1.0", routes=routes, tags=tags)
    bodies = dict.fromkeys(route.body for api in apis for route in api.table if route.body and not route.is_alias)
    schemas = schemas_of(list(bodies), refs=SCHEMAS.format(name="{model}"))
    made["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    return made


def add_middleware(app: FastAPI, paths: Iterable[str], *, flag: str = "--middleware") -> None:
    """Add ASGI middleware by import path, the last outermost, as in vLLM.

    Each is a class, or a coroutine function (request, call_next). The working directory is searched
    last, so that its modules hide none of ours. Raises ConfigError.
    """
    for path in paths:
        found: Any = _imported(path, flag)
        if isinstance(found, type):
            app.add_middleware(cast(Any, found))
        elif inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        else:
            raise ConfigError(f"{flag}: {path} is neither a class nor a coroutine function (request, call_next)")


def _imported(path: str, flag: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # for good: middleware may import more when it is called
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{flag}: cannot import {path!r} ({error}); give MODULE:NAME of what the working directory or PYTHONPATH has"
        ) from None
