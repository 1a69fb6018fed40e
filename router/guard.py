"""The middleware around every route: request ids, the clients' key, and errors in OpenAI's shape. Decides no routing."""

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from router.errors import error_response
from router.metrics import RouterMetrics
from router.rewrite import Api, BadBody
from router.workers import WorkerTableError

log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 256
REQUEST_ID = web.RequestKey("request_id", str)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN_PATHS = frozenset(("/health", "/liveness", "/readiness", "/metrics"))
_COUNTED_PATHS = frozenset(Api)


def make_guard(*, api_key: str | None, metrics: RouterMetrics) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The middleware. `api_key`: what clients must send, None: nothing."""
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        request_id = request.headers.get("X-Request-Id", "")[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex
        request[REQUEST_ID] = request_id
        if expected is not None and request.path not in _OPEN_PATHS and not _authorized(request, expected):
            response: web.StreamResponse = error_response(
                401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        elif request.path in _COUNTED_PATHS:
            response = await _counted(request, handler, metrics)
        else:
            response = await _answered(request, handler)
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
        return response

    return guard


async def _counted(request: web.Request, handler: _Handler, metrics: RouterMetrics) -> web.StreamResponse:
    """A generation request; one whose client went away counts as status 499."""
    started_s, status = time.monotonic(), "499"
    metrics.inflight.inc()
    try:
        response = await _answered(request, handler)
        status = str(response.status)
        return response
    finally:
        metrics.inflight.dec()
        metrics.requests.labels(request.path, status).inc()
        metrics.duration_s.labels(request.path).observe(time.monotonic() - started_s)


async def _answered(request: web.Request, handler: _Handler) -> web.StreamResponse:
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


def _http_error(request: web.Request, err: web.HTTPException) -> web.StreamResponse:
    message = {
        404: f"{request.path} is not served here",
        405: f"{request.path} does not take {request.method}",
        413: "the request body is longer than --max-body-bytes",
    }.get(err.status, err.text or err.reason)
    headers = {"Allow": err.headers["Allow"]} if "Allow" in err.headers else None
    return error_response(err.status, message, headers=headers)


def _authorized(request: web.Request, expected: bytes) -> bool:
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    return hmac.compare_digest(given, expected)
