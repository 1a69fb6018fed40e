"""A worker's routes, and what surrounds them besides the guard: metrics, the access log, a bound on open requests.

Must not know how the engine was started, or any request's fields.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from engine.frontend.access import OPEN_PATHS, need_of
from engine.frontend.apis.admin import admin, traces
from engine.frontend.apis.control import adapters, engine, role_switch
from engine.frontend.apis.native import generate
from engine.frontend.apis.openai import embeddings, openai
from engine.frontend.openapi import make_document, serve_document
from engine.frontend.services import SERVICES, Services
from service.http.errors import ApiError
from service.http.guard import CLIENT_GONE, make_guard
from service.http.routes import Handler, Routes
from service.http.stream import REQUEST_ID
from service.telemetry.logs import about

log = logging.getLogger(__name__)

MUTED_PATHS = (*OPEN_PATHS, "/get_load", "/v1/loads", "/server_info", "/get_server_info")


def make_handle(services: Services, *, max_open: int = 1 << 16) -> Handler:
    """The function that answers every request of a worker.

    `max_open`: requests with a body that may be in progress; one more is 503, before its body is read.
    """
    bounded = _bound(max_open)
    document = serve_document(make_document((*_GETS, "/openapi.json"), _POSTS))
    routes = Routes(
        [
            web.get("/openapi.json", document),
            *(web.get(path, handler) for path, handler in _GETS.items()),
            *(web.post(path, bounded(handler)) for path, handler in _POSTS.items()),
            web.put("/generate", bounded(generate.generate)),
        ]
    )
    guard = make_guard(routes, gate=services.gate, need_of=lambda method, path: need_of(path), browser=services.browser)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        start_s, status = time.monotonic(), CLIENT_GONE
        endpoint = routes.of(request).path or "other"
        request[SERVICES] = services
        services.metrics.on_http(endpoint, request.method)
        try:
            response = await guard(request)
            status = response.status
            return response
        finally:
            services.metrics.on_http_end(endpoint, request.method, status)
            _log(request, status, time.monotonic() - start_s)

    return handle


_GETS: dict[str, Handler] = {
    "/health": admin.health,
    "/liveness": admin.liveness,
    "/health_generate": admin.health_generate,
    "/v1/models": openai.list_models,
    "/v1/models/{model}": openai.get_model,
    "/model_info": admin.model_info,
    "/get_model_info": admin.model_info,
    "/server_info": admin.server_info,
    "/get_server_info": admin.server_info,
    "/get_load": admin.old_load,
    "/v1/loads": admin.loads,
    "/metrics": admin.metrics,
    "/flush_cache": admin.flush_cache,
    "/check": admin.check,
}
_POSTS: dict[str, Handler] = {
    "/v1/completions": openai.completions,
    "/v1/chat/completions": openai.chat_completions,
    "/generate": generate.generate,
    "/v1/embeddings": embeddings.embeddings,
    "/flush_cache": admin.flush_cache,
    "/abort_request": admin.abort_request,
    "/traces": traces.traces,
    "/pause_generation": engine.pause_generation,
    "/continue_generation": engine.continue_generation,
    "/update_weights_from_disk": engine.update_weights_from_disk,
    "/load_lora_adapter": adapters.load_lora_adapter,
    "/unload_lora_adapter": adapters.unload_lora_adapter,
    "/start_profile": engine.start_profile,
    "/stop_profile": engine.stop_profile,
    "/switch_role": role_switch.switch_role,
    "/tokenize": admin.tokenize,
    "/v1/tokenize": admin.tokenize,
    "/detokenize": admin.detokenize,
    "/v1/detokenize": admin.detokenize,
}


def _log(request: web.BaseRequest, status: int, taken_s: float) -> None:
    level = logging.DEBUG if request.path in MUTED_PATHS and status < 400 else logging.INFO
    fields = about(method=request.method, path=request.path, status=status, duration_s=round(taken_s, 6))
    request_id = request[REQUEST_ID]
    log.log(level, "%s %s %d %.3fs %s", request.method, request.path, status, taken_s, request_id, extra=fields)


def _bound(max_open: int) -> Callable[[Handler], Handler]:
    """Bodies, and texts that wait for the tokenizer, take memory before the engine counts them."""
    open_ones: set[int] = set()

    def bounded(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> Handler:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if len(open_ones) >= max_open:
                message = f"{len(open_ones)} requests are in progress; try again later"
                raise ApiError(503, message, code="queue_full", retry_after_s=1)
            open_ones.add(id(request))
            try:
                return await handler(request)
            finally:
                open_ones.discard(id(request))

        return handle

    return bounded
