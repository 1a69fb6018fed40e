"""The aiohttp application of a worker: routes, and what surrounds every handler (request id, errors, API key, log).

Must not know how the engine was started, or any request's fields.
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from engine.frontend import (
    adapters,
    admin_api,
    control_api,
    embeddings_api,
    native_api,
    openai_api,
    role_switch,
    traces_api,
)
from engine.frontend.access import OPEN_PATHS, check_access, check_page
from engine.frontend.errors import ApiError
from engine.frontend.openapi import DOCUMENT, make_document, openapi
from engine.frontend.services import SERVICES, Services
from engine.frontend.stream import STREAMING, json_response
from security.expect import say_continue
from telemetry.context import CURRENT, OPERATIONS, RequestContext, request_id_of
from telemetry.logs import about

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

MUTED_PATHS = (*OPEN_PATHS, "/get_load", "/v1/loads", "/server_info", "/get_server_info")
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def make_app(services: Services, *, max_body_bytes: int, max_open: int = 1 << 16) -> web.Application:
    """The application; serve it with `handler_cancellation=True`, so that a client that goes away aborts its request.

    `max_open`: requests with a body that may be in progress; one more is 503, before its body is read.
    """
    bound = _bound(max_open)
    surroundings = [_request_id, _errors, check_page, check_access, bound]
    app = web.Application(client_max_size=max_body_bytes, middlewares=surroundings)
    app[SERVICES] = services
    app[DOCUMENT] = make_document(_GETS, _POSTS)
    app.on_response_prepare.append(_echo_request_id)
    for path, handler in _GETS.items():
        app.router.add_get(path, handler, expect_handler=say_continue)
    for path, handler in _POSTS.items():
        app.router.add_post(path, handler, expect_handler=say_continue)
    app.router.add_put("/generate", native_api.generate, expect_handler=say_continue)
    return app


_GETS: dict[str, Handler] = {
    "/health": admin_api.health,
    "/liveness": admin_api.liveness,
    "/health_generate": admin_api.health_generate,
    "/v1/models": openai_api.list_models,
    "/v1/models/{model:.+}": openai_api.get_model,
    "/model_info": admin_api.model_info,
    "/get_model_info": admin_api.model_info,
    "/server_info": admin_api.server_info,
    "/get_server_info": admin_api.server_info,
    "/get_load": admin_api.old_load,
    "/v1/loads": admin_api.loads,
    "/metrics": admin_api.metrics,
    "/flush_cache": admin_api.flush_cache,
    "/check": admin_api.check,
    "/openapi.json": openapi,
}
_POSTS: dict[str, Handler] = {
    "/v1/completions": openai_api.completions,
    "/v1/chat/completions": openai_api.chat_completions,
    "/generate": native_api.generate,
    "/v1/embeddings": embeddings_api.embeddings,
    "/flush_cache": admin_api.flush_cache,
    "/abort_request": admin_api.abort_request,
    "/traces": traces_api.traces,
    "/pause_generation": control_api.pause_generation,
    "/continue_generation": control_api.continue_generation,
    "/update_weights_from_disk": control_api.update_weights_from_disk,
    "/load_lora_adapter": adapters.load_lora_adapter,
    "/unload_lora_adapter": adapters.unload_lora_adapter,
    "/start_profile": control_api.start_profile,
    "/stop_profile": control_api.stop_profile,
    "/switch_role": role_switch.switch_role,
    "/tokenize": admin_api.tokenize,
    "/v1/tokenize": admin_api.tokenize,
    "/detokenize": admin_api.detokenize,
    "/v1/detokenize": admin_api.detokenize,
}


@web.middleware
async def _request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    start_s = time.monotonic()
    request_id = request[REQUEST_ID] = request_id_of(request.headers.get("X-Request-ID", "")) or uuid.uuid4().hex
    operation = OPERATIONS.get(request.path, "")
    CURRENT.set(RequestContext(request_id, operation, request.headers.get("traceparent", "")))  # this task is its own
    status = 499  # what the log calls a client that went away
    endpoint, metrics = _endpoint(request), request.app[SERVICES].metrics
    metrics.on_http(endpoint, request.method)
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        metrics.on_http_end(endpoint, request.method, status)
        level = logging.DEBUG if request.path in MUTED_PATHS and status < 400 else logging.INFO
        taken_s = time.monotonic() - start_s
        said = about(method=request.method, path=request.path, status=status, duration_s=round(taken_s, 6))
        log.log(level, "%s %s %d %.3fs %s", request.method, request.path, status, taken_s, request_id, extra=said)


def _endpoint(request: web.Request) -> str:
    """The route, not the path: metrics have few labels whatever is asked for."""
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure is an answer in OpenAI's shape, as long as no other answer has begun."""
    try:
        return await handler(request)
    except ApiError as e:
        return _error_response(e)
    except web.HTTPException as e:
        return _error_response(_from_http(e, request), allow=e.headers.get("Allow"))
    except web.RequestPayloadError as e:
        response = _error_response(ApiError(400, f"the body cannot be read: {' '.join(str(e).split())}"))
        response.force_close()  # where the next request would begin is unknown; tell the client
        return response
    except ConnectionError:
        raise
    except RecursionError:
        return _error_response(ApiError(400, "the body is nested too deeply", code="invalid_json"))
    except Exception:
        if request.get(STREAMING):
            raise
        log.exception("%s %s failed", request.method, request.path)
        return _error_response(ApiError(500, "internal error; the server's log has the details", code="internal_error"))


def _bound(max_open: int) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Bodies, and texts that wait for the tokenizer, take memory before the engine counts them."""
    open_ones: set[int] = set()

    @web.middleware
    async def bound(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "GET":
            return await handler(request)
        if len(open_ones) >= max_open:
            message = f"{len(open_ones)} requests are in progress; try again later"
            raise ApiError(503, message, code="queue_full", retry_after_s=1)
        open_ones.add(id(request))
        try:
            return await handler(request)
        finally:
            open_ones.discard(id(request))

    return bound


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["X-Request-ID"] = request[REQUEST_ID]


def _from_http(e: web.HTTPException, request: web.Request) -> ApiError:
    if e.status == 404:
        return ApiError(404, f"there is no {request.path} here", code="not_found")
    if e.status == 405:
        return ApiError(405, f"{request.method} is not possible on {request.path}", code="method_not_allowed")
    if e.status == 413:
        return ApiError(413, "the body is too long (--max-body-bytes)", code="body_too_large")
    return ApiError(e.status, e.reason)


def _error_response(e: ApiError, *, allow: str | None = None) -> web.Response:
    response = json_response(e.body(), status=e.status)
    if e.retry_after_s is not None:
        response.headers["Retry-After"] = str(e.retry_after_s)
    if allow is not None:
        response.headers["Allow"] = allow
    return response
