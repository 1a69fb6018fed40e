"""An API as a FastAPI router, and the application of a server.

FastAPI documents the routes, mounts them into other applications, and takes middleware. A table of
paths (routes.py) finds a handler faster than a scan of patterns.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI, Response
from fastapi import Request as FastApiRequest
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp

from service.flags import ConfigError, installed_version
from service.http.body import Body, schemas_of
from service.http.errors import RequestLimits
from service.http.request import Handler, HttpRequest, asgi_app
from service.http.routes import EVENTS_TYPE, HttpRoute, Tag, shape_of
from service.security.keys import Access

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
    """Summary and description, by default of the handler's docstring."""
    text = route.about or inspect.getdoc(route.handler) or ""
    summary, _, description = text.partition("\n")
    return summary.rstrip("."), description.strip()


def _endpoint(handler: Handler) -> Callable[[FastApiRequest], Awaitable[Response]]:

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
    tags = [tag._asdict() for tag in dict.fromkeys(api.tag for api in apis)]
    routes = [route for api in apis for route in api.routes]
    made = get_openapi(title=title, version=installed_version(), openapi_version="3.1.0", routes=routes, tags=tags)
    bodies = dict.fromkeys(route.body for api in apis for route in api.table if route.body)
    schemas = schemas_of(list(bodies), refs=SCHEMAS.format(name="{model}"))
    made["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    return made


def add_middleware(app: FastAPI, paths: Iterable[str], *, flag: str = "--middleware") -> None:
    """Add ASGI middleware by import path, the last outermost, as in vLLM.

    Each is a class, or a coroutine function (request, call_next). The working directory is searched
    last. Raises ConfigError.
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


# ---- parts of the OpenAPI document

TEXT = {"type": "string"}
# The schema of a stream describes each event, as before OpenAPI 3.2.
EVENT = {"type": "object", "properties": {"data": TEXT}, "required": ["data"]}
FAILURES = {
    "400": "the body is wrong; the message names the field",
    "401": "the API key is missing or wrong",
    "403": "this needs the admin key; or a web page of another site sent it",
    "404": "there is no such model or path",
    "409": "not in this state: a room is in use, or a worker changes its role",
    "413": "the body is too long",
    "415": "the body is not declared as JSON",
    "503": "no server can take this now; try again later",
}

SCHEMAS = "#/components/schemas/{name}"
_PATTERN = re.compile(r"{(\w+)}")


def operation(route: HttpRoute) -> dict[str, Any]:
    """The part of a route's operation that follows from its fields."""
    parameters = [{"name": n, "in": "path", "required": True, "schema": TEXT} for n in _PATTERN.findall(route.path)]
    good = (
        {"description": "done"} if route.empty else answer("done", plain_text=route.plain_text, streams=route.streams)
    )
    body = {} if route.body is None else json_content({"$ref": SCHEMAS.format(name=route.body.__name__)})
    failures = failures_of(FAILURES, shape_of(route.path).schema)
    return {
        "responses": {"200": good, **({"202": answer("started")} if route.starts else {}), **failures},
        **({} if route.body is None else {"requestBody": {"required": route.body_required, "content": body}}),
        **({"parameters": parameters} if parameters else {}),
        **({} if route.need is Access.NONE else {"security": [{"key": []}, {}]}),
    }


def answer(description: str, *, plain_text: bool = False, streams: str = "") -> dict[str, Any]:
    """An answer with JSON or text, or with a stream."""
    if plain_text:
        return {"description": description, "content": {"text/plain": {"schema": TEXT}}}
    events = {streams: {"schema": EVENT if streams == EVENTS_TYPE else {}}} if streams else {}
    return {"description": description, "content": {**json_content({}), **events}}


def failures_of(texts: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    return {status: {"description": text, "content": json_content(schema)} for status, text in texts.items()}


def json_content(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


# ---- The body of GET /v1/loads, as in SGLang.


def loads_answer(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row per rank. The time is text, as SMG rejects numbers."""
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": installed_version(),
        "dp_rank_count": len(rows),
        "loads": rows,
    }
