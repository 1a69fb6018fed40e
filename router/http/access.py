"""API keys by route, and the rate limit."""

import math
import time
from collections.abc import Callable

from aiohttp import web

from router.admission.admission import client_name
from router.admission.queue import RateLimiter
from router.http.fan_out import LOAD_ADAPTER, TIMEOUTS_S, UNLOAD_ADAPTER
from router.http.traces_api import TRACES
from router.metrics import RouterMetrics
from service.http.errors import ApiError
from service.http.home import CHAT, HOME, SHARED, files_of
from service.security.keys import Access

# ---- Static files of the router's pages.

FILES = SHARED | CHAT | files_of("router.dashboard", "/dashboard")


# ---- access

_OPEN_PATHS = (
    frozenset(("/health", "/liveness", "/readiness", HOME, "/metrics", "/openapi.json", "/ping", "/version"))
    | FILES.keys()
)
# Routes that change workers for all clients. Any unlisted route needs an API key.
_ADMIN_ROUTES = frozenset((("POST", "/workers"), ("DELETE", "/workers")))
_ADMIN_PATHS = frozenset((*TIMEOUTS_S, LOAD_ADAPTER, UNLOAD_ADAPTER, TRACES, "/workers/role", "/workers/migrate"))


def need_of(method: str, path: str) -> Access:
    if path in _OPEN_PATHS:
        return Access.NONE
    if path in _ADMIN_PATHS or (method, path) in _ADMIN_ROUTES or path.startswith("/dashboard/"):
        return Access.ADMIN  # the dashboard shows all clients' requests
    return Access.USER


def limit_rate(limiter: RateLimiter, metrics: RouterMetrics) -> Callable[[web.BaseRequest, Access], ApiError | None]:
    """Return a check that refuses a client above its rate, except on open routes."""

    def admit(request: web.BaseRequest, need: Access) -> ApiError | None:
        if need is Access.NONE:
            return None
        wait_s = limiter.wait_s(client_name(request), time.monotonic())
        if wait_s == 0.0:
            return None
        metrics.on_refused("rate")
        message = "too many requests from this client (--rate-limit-requests-per-second)"
        return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=math.ceil(wait_s))

    return admit
