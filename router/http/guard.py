"""What stands around every route: request ids, who may call what and how often, errors in OpenAI's shape. No routing."""

import logging
import math
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from router.admission.rate_limit import RateLimiter, client_of
from router.dashboard.page import FILE_PATHS
from router.http.errors import error_response
from router.http.routes import Handler
from router.metrics import RouterMetrics
from router.pool.workers import WorkerTableError
from router.requests.journey import CLIENT_GONE
from router.requests.rewrite import Api, BadBody
from security.browser import BrowserRule
from security.keys import Access, Caller, Gate
from telemetry.context import request_id_of

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)

CALLER = web.RequestKey("caller", Caller)
_OPEN_PATHS = frozenset(("/health", "/liveness", "/readiness", "/metrics", "/openapi.json")) | FILE_PATHS
# What changes workers for everybody, or the pool. A route named nowhere here needs an API key.
_ADMIN_ROUTES = frozenset((("POST", "/workers"), ("DELETE", "/workers")))
_ADMIN_PATHS = frozenset(
    (
        "/flush_cache",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/start_profile",
        "/stop_profile",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/traces",
        "/workers/role",
    )
)
_COUNTED_PATHS = frozenset(Api)


def need_of(method: str, path: str) -> Access:
    """What a caller must be."""
    if path in _OPEN_PATHS:
        return Access.NONE
    if path in _ADMIN_PATHS or (method, path) in _ADMIN_ROUTES or path.startswith("/dashboard/"):
        return Access.ADMIN  # the dashboard: it names the requests of all clients
    return Access.USER


def _nobody(request: web.BaseRequest) -> bool:
    return False


def make_guard(
    *,
    gate: Gate,
    limiter: RateLimiter | None,
    metrics: RouterMetrics,
    new_id: Callable[[], str],
    browser: BrowserRule,
    is_sibling: Callable[[web.BaseRequest], bool] = _nobody,
) -> Callable[[web.BaseRequest, Handler], Awaitable[web.StreamResponse]]:
    """The guard. `limiter` counts what needs a key; None: no limit. `new_id` names requests that came without a name.

    `is_sibling`: another process of this router asks, which checked its caller itself.
    """

    async def guard(request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        request_id = request_id_of(request.headers.get("X-Request-Id", "")) or new_id()
        request[REQUEST_ID] = request_id
        response: web.StreamResponse | None = None
        if not is_sibling(request):
            response = _refused_page(request, browser, metrics) or _refused(request, gate, limiter, metrics)
        if response is not None:
            pass
        elif request.path in _COUNTED_PATHS:
            response = await _counted(request, handler, metrics)
        else:
            response = await _answered(request, handler)
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
        return response

    return guard


async def _counted(request: web.BaseRequest, handler: Handler, metrics: RouterMetrics) -> web.StreamResponse:
    """A generation request; one whose client went away counts as status 499."""
    started_s, status = time.monotonic(), CLIENT_GONE
    metrics.on_begin()
    try:
        response = await _answered(request, handler)
        status = response.status
        return response
    finally:
        metrics.on_answered(request.path, status, time.monotonic() - started_s)


async def _answered(request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or its exception as one."""
    try:
        return await handler(request)
    except BadBody as err:
        return error_response(400, str(err), param=err.field)
    except WorkerTableError as err:
        return error_response(400, str(err), param="url")
    except web.HTTPException as err:
        return _http_error(request, err)
    except web.RequestPayloadError as err:  # broken chunks, wrong compression, a body cut short
        response = error_response(400, f"the body cannot be read: {' '.join(str(err).split())}")
        response.force_close()  # where the next request would begin is unknown; tell the client
        return response
    except ConnectionError:
        raise  # the client went away while we wrote; nobody reads an answer
    except Exception:
        log.exception("a bug in the router: %s %s", request.method, request.path)
        return error_response(500, "internal error of the router; its log has the details")


def _http_error(request: web.BaseRequest, err: web.HTTPException) -> web.StreamResponse:
    message = {
        404: f"{request.path} is not served here",
        405: f"{request.path} does not take {request.method}",
        408: "the request body did not come in time (--body-timeout-s)",
        413: "the request body is longer than --max-body-bytes",
    }.get(err.status, err.text or err.reason)
    headers = {"Allow": err.headers["Allow"]} if "Allow" in err.headers else None
    response = error_response(err.status, message, headers=headers)
    if err.status in (408, 413):  # the rest of the body is not wanted
        response.force_close()
    return response


def require_admin(request: web.BaseRequest, gate: Gate) -> web.Response | None:
    """For a handler that only now knows what is asked for: None, or the refusal."""
    refusal = gate.refusal(request[CALLER], Access.ADMIN)
    return None if refusal is None else _refusal(*refusal)


def client_name(request: web.BaseRequest) -> str:
    """Who asks, for what is counted by client: its API key's name, else its address."""
    return request[CALLER].name or client_of(request.remote)


def _refused_page(request: web.BaseRequest, browser: BrowserRule, metrics: RouterMetrics) -> web.Response | None:
    """A request that a web page of another site could have made; or whose body is not declared as JSON."""
    refusal = browser.refusal(request.method, request.path, request.headers, has_body=request.body_exists)
    if refusal is None:
        return None
    metrics.refused.labels("browser").inc()
    return error_response(refusal.status, refusal.message, code=refusal.code)


def _refused(
    request: web.BaseRequest, gate: Gate, limiter: RateLimiter | None, metrics: RouterMetrics
) -> web.Response | None:
    now_s, need = time.monotonic(), need_of(request.method, request.path)
    caller = request[CALLER] = gate.caller(request.headers.get("Authorization", ""), now_s)
    refusal = gate.refusal(caller, need)
    if refusal is not None:
        metrics.refused.labels("key").inc()
        return _refusal(*refusal)
    if limiter is None or need is Access.NONE:
        return None
    wait_s = limiter.wait_s(client_name(request), now_s)
    if wait_s == 0.0:
        return None
    metrics.refused.labels("rate").inc()
    message = "too many requests from this client (--rate-limit-requests-per-second)"
    return error_response(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(math.ceil(wait_s))})


def _refusal(status: int, message: str) -> web.Response:
    return error_response(status, message, code="invalid_api_key" if status == 401 else "admin_key_needed")
