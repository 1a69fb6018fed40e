"""Which routes of a worker need which key. A route that is not named here needs an API key; new ones are safe by default.

Owns the table and the middleware that reads it; the keys are the gate's (`security/keys.py`).
"""

import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from engine.frontend.errors import ApiError
from engine.frontend.services import SERVICES
from security.keys import Access, Caller

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)

# Health for probes, metrics for scrapers (counts and times, no contents), the API's description.
OPEN_PATHS = ("/health", "/liveness", "/health_generate", "/metrics", "/openapi.json")
# What changes the server for everybody, reads or writes its disk, or stops it for a while.
ADMIN_PATHS = frozenset(
    (
        "/flush_cache",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/start_profile",
        "/stop_profile",
        "/check",
        "/traces",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/switch_role",
    )
)


def need_of(path: str) -> Access:
    if path in OPEN_PATHS:
        return Access.NONE
    return Access.ADMIN if path in ADMIN_PATHS else Access.USER


@web.middleware
async def check_page(request: web.Request, handler: Handler) -> web.StreamResponse:
    """403 or 415 for what a web page of another site could have sent, or the handler's answer."""
    rule = request.app[SERVICES].browser
    refusal = rule.refusal(request.method, request.path, request.headers, has_body=request.body_exists)
    if refusal is not None:
        raise ApiError(refusal.status, refusal.message, code=refusal.code)
    return await handler(request)


@web.middleware
async def check_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """401 or 403, or the handler's answer; it finds the caller at `CALLER`."""
    request[CALLER] = request.app[SERVICES].gate.caller(request.headers.get("Authorization", ""), time.monotonic())
    require(request, need_of(request.path))
    return await handler(request)


def require(request: web.Request, need: Access) -> None:
    """For a handler that only now knows what is asked for. Raises ApiError(401 or 403)."""
    refusal = request.app[SERVICES].gate.refusal(request[CALLER], need)
    if refusal is not None:
        raise ApiError(*refusal, code="invalid_api_key" if refusal[0] == 401 else "admin_key_needed")
