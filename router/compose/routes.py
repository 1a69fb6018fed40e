"""A router's routes, the keys that they need, and the request handler."""

import secrets
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from fastapi import Response

from router.compose.exposure import browser_rule
from router.compose.router import Router
from router.history.metrics import counted
from router.http.dashboard import Dashboard
from router.http.fan_out import JOIN_GROUP, LOAD_ADAPTER, TIMEOUTS_S, UNLOAD_ADAPTER, AnyWorkerApi, FanOutApi, LoadsApi
from router.http.health_api import HealthApi
from router.http.openapi import GENERATION, TITLE, generation_routes, make_document, worker_document
from router.http.traces_api import TRACES, TracesApi
from router.http.workers_api import BELOW, WorkersApi
from router.parts.admission import limit_rate, make_limiter
from router.requests.responses import ResponsesApi
from service.http.api import OPENAPI_PATH, ApiRouter, Application, add_middleware
from service.http.errors import RequestLimits
from service.http.guard import make_guard
from service.http.home import CHAT, HOME, SHARED, files_of, home_route, page_routes
from service.http.request import HttpRequest
from service.http.routes import UNSERVED, HttpRoute, Routes, get, json_response, post, refuse
from service.security.keys import Access

# ---- Static files of the router's pages.

FILES = SHARED | CHAT | files_of("router.dashboard", "/dashboard")


# ---- Keys by route.

_OPEN_PATHS = (
    frozenset(("/health", "/liveness", "/readiness", HOME, "/metrics", "/openapi.json", "/ping", "/version"))
    | FILES.keys()
)
# Routes that change workers for all clients. Any unlisted route needs an API key.
_ADMIN_ROUTES = frozenset((("POST", "/workers"), ("DELETE", "/workers")))
_ADMIN_PATHS = frozenset((*TIMEOUTS_S, JOIN_GROUP, LOAD_ADAPTER, UNLOAD_ADAPTER, TRACES))
_ADMIN_PREFIXES = ("/dashboard/", BELOW)  # the dashboard shows all clients' requests


def need_of(method: str, path: str) -> Access:
    if path in _OPEN_PATHS:
        return Access.NONE
    if path in _ADMIN_PATHS or (method, path) in _ADMIN_ROUTES or path.startswith(_ADMIN_PREFIXES):
        return Access.ADMIN
    return Access.USER


# ---- The handler.


class RouterApis(NamedTuple):
    documented: Sequence[ApiRouter]
    routes: Routes


def make_app(router: Router, limits: RequestLimits) -> Application:
    """Rate limits are divided among processes."""
    config, share = router.config, 1 if router.slot is None else router.config.workers
    limiter = make_limiter(config.rate_limit_requests_per_second / share, -(-config.rate_limit_burst // share))
    apis = make_apis(router)
    handle = make_guard(
        apis.routes,
        gate=router.gate,
        need_of=need_of,
        browser=browser_rule(config, router.gate),
        admit=None if limiter is None else limit_rate(limiter, router.metrics.on_refused),
        is_trusted=None if router.slot is None else router.peers.is_peer,
        on_refused=router.metrics.on_refused,
        new_id=partial(secrets.token_hex, 16),
    )
    app = Application(TITLE, apis.documented, handle=handle, limits=limits)
    add_middleware(app, config.middleware)
    return app


def make_apis(router: Router) -> RouterApis:
    config, peers, calls = router.config, router.peers, router.calls
    health = HealthApi(calls, live=router.live, metrics=router.metrics, peers=peers)
    workers = WorkersApi(
        calls, config=config, monitor=router.monitor, switch=router.switch, peers=peers, discovery=router.discovery
    )
    any_worker = AnyWorkerApi(calls)
    fan_out = FanOutApi(calls, monitor=router.monitor, gate=router.gate, live=router.live, peers=peers)
    dashboard = Dashboard(
        config=config,
        table=router.table,
        recorder=router.recorder,
        live=router.live,
        num_running=lambda: router.admission.queue.num_everywhere,
        peers=peers,
        auto_roles=router.auto_roles.leading_status if config.auto_roles else None,
    )
    traces = TracesApi(calls=calls, tracer=router.tracer, peers=peers, memory=dashboard.memory)
    generate, invoke = (counted(act, router.metrics) for act in (router.dispatcher.handle, router.dispatcher.invoke))
    apis = (
        ApiRouter(GENERATION, generation_routes(generate, invoke)),
        ResponsesApi(router.book, peers=peers).api(),
        any_worker.api(),
        *(health.api(), dashboard.api(), traces.api()),
        *(workers.api(), LoadsApi(calls).api(), router.auto_roles.api(), fan_out.api()),
    )

    async def openapi(request: HttpRequest) -> Response:
        return json_response(make_document(apis, await worker_document(calls)))

    pages = [*page_routes(FILES), _home(router), *(post(path, refuse) for path in UNSERVED), get(OPENAPI_PATH, openapi)]
    return RouterApis(apis, Routes([*(route for api in apis for route in api.table), *pages]))


def _home(router: Router) -> HttpRoute:
    pages = {"/chat": "talk to the model", "/dashboard": "what router and workers do right now"}
    links = {path: what for path, what in pages.items() if path in FILES}
    return home_route("router", models=lambda: router.table.models.names, links=links)
