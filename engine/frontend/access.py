"""Which routes of a worker need which key. A route that is not named here needs an API key; new ones are safe by default."""

from aiohttp import web

from engine.frontend.services import SERVICES
from service.http.guard import key_refusal
from service.security.keys import Access

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


def require(request: web.BaseRequest, need: Access) -> None:
    """For a handler that only now knows what is asked for. Raises ApiError(401 or 403)."""
    refusal = key_refusal(request, request[SERVICES].gate, need)
    if refusal is not None:
        raise refusal
