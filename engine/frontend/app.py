"""Handles a worker's requests: routes, guard, metrics, access log, limits."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from fastapi import Response

from engine.frontend.routes import APIS, ROUTES, need_of
from engine.frontend.services import SERVICES, Services
from engine.frontend.spec import limits_of
from service.http.api import OPENAPI_PATH, Application, add_middleware, document
from service.http.errors import ApiError
from service.http.guard import CLIENT_GONE, make_guard
from service.http.home import CHAT, SHARED, home_route, page_routes
from service.http.request import Handler, HttpRequest
from service.http.routes import REQUEST_ID, HttpRoute, Routes, get, json_response
from service.telemetry.context import about

log = logging.getLogger(__name__)

TITLE = "Tandem worker"
HTTP_CLOSE_S = 1.0  # for answers in progress when the server ends
SPARE_REQUESTS = 1024  # HTTP requests beyond the maximum of live samples
QUIET_PATHS = frozenset((OPENAPI_PATH, *(route.path for route in ROUTES if route.is_polled)))


def make_app(services: Services, handle: Handler) -> Application:
    """Raises ConfigError."""
    app = Application(TITLE, APIS, handle=handle, limits=limits_of(services.spec.server))
    add_middleware(app, services.spec.server.middleware)
    return app


def make_handle(services: Services, *, max_open: int = 1 << 16) -> Handler:
    """`max_open`: requests with a body; beyond it 503, before reading the body."""
    encodes = services.spec.mode == "encode"
    routes = Routes([*_routes(_bound(max_open), encodes=encodes), *page_routes(_files(services)), _home(services)])
    guard = make_guard(routes, gate=services.gate, need_of=lambda method, path: need_of(path), browser=services.browser)

    for route in ROUTES:
        if route.streams and not route.is_alias:
            services.metrics.expect(route.path, route.method)

    async def handle(request: HttpRequest) -> Response:
        start_s, status = time.monotonic(), CLIENT_GONE
        endpoint = routes.of(request).path or "other"
        request[SERVICES] = services
        services.metrics.on_http(endpoint, request.method)
        try:
            response = await guard(request)
            status = response.status_code
            return response
        finally:
            services.metrics.on_http_end(endpoint, request.method, status)
            _log(request, status, time.monotonic() - start_s)

    return handle


def _routes(bounded: Callable[[Handler], Handler], *, encodes: bool) -> Iterator[HttpRoute]:
    made = cache(lambda: document(APIS, title=TITLE))

    async def openapi(request: HttpRequest) -> Response:
        return json_response(made())

    yield get(OPENAPI_PATH, openapi)
    for route in ROUTES:
        handler = refuse_to_generate if encodes and route.computes else route.handler
        handler = handler if route.method == "GET" else bounded(handler)
        yield HttpRoute(route.method, route.path, handler)


async def refuse_to_generate(request: HttpRequest) -> Response:
    message = (
        f"{request.path}: this is an encode worker (--disaggregation-mode encode): it encodes images for other workers and generates "
        "nothing; send the request to the router"
    )
    raise ApiError(400, message, code="encode_worker")


def _files(services: Services) -> Mapping[str, Path]:
    """Workers of a pair or without tokenizer have no chat page."""
    return SHARED | CHAT if services.spec.mode == "null" and services.model.has_text else SHARED


def _home(services: Services) -> HttpRoute:
    server = "worker" if services.spec.mode == "null" else f"{services.spec.mode} worker"
    links = {"/chat": "talk to the model"} if "/chat" in _files(services) else {}
    return home_route(server, models=lambda: (services.model.served_name, *services.leaders.adapters), links=links)


def level_of(path: str, status: int) -> int:
    is_usual = status < 400 or status in (CLIENT_GONE, 503)  # of a probe: it loads or drains
    return logging.DEBUG if path in QUIET_PATHS and is_usual else logging.INFO


def _log(request: HttpRequest, status: int, taken_s: float) -> None:
    level = level_of(request.path, status)
    fields = about(method=request.method, path=request.path, status=status, duration_s=round(taken_s, 6))
    request_id = request[REQUEST_ID]
    log.log(level, "%s %s %d %.3fs %s", request.method, request.path, status, taken_s, request_id, extra=fields)


def _bound(max_open: int) -> Callable[[Handler], Handler]:
    """Limit bodies and texts that the engine does not count yet."""
    num_open = 0

    def bounded(handler: Handler) -> Handler:
        async def handle(request: HttpRequest) -> Response:
            nonlocal num_open
            if num_open >= max_open:
                message = f"{num_open} requests are in progress; try again later"
                raise ApiError(503, message, code="queue_full", retry_after_s=1)
            num_open += 1
            try:
                return await handler(request)
            finally:
                num_open -= 1

        return handle

    return bounded
