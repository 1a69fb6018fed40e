"""The table of a worker's routes. app.py serves it, openapi.py describes it."""

from dataclasses import dataclass, replace

import msgspec

from engine.frontend.apis.admin import health, info, tokens
from engine.frontend.apis.control import adapters, engine, requests, role_switch
from engine.frontend.apis.native.body import GenerateBody
from engine.frontend.apis.native.generate import generate
from engine.frontend.apis.openai.bodies import ChatBody, CompletionBody
from engine.frontend.apis.openai.chat import chat_completions
from engine.frontend.apis.openai.completions import completions
from engine.frontend.apis.openai.embeddings import EmbeddingBody, embeddings
from engine.frontend.apis.openai.models import get_model, list_models
from service.http.routes import Handler
from service.security.keys import Access
from service.telemetry.records import TracesQuery

Body = type[msgspec.Struct]


@dataclass(frozen=True, kw_only=True)
class ApiRoute:
    """`need`: the caller's key. `is_polled`: its good answers are not logged.

    For openapi.py: `is_alias` (not described), `body` (None: no body), `streams` (JSON or events), `plain_text` or `empty`
    answers, and `starts`: the work goes on after a 202.
    """

    method: str
    path: str
    handler: Handler
    need: Access = Access.USER
    is_polled: bool = False
    is_alias: bool = False
    body: Body | None = None
    body_required: bool = True
    streams: bool = False
    plain_text: bool = False
    empty: bool = False
    starts: bool = False


def _get(
    path: str, handler: Handler, *, need: Access = Access.USER, is_polled: bool = False, plain_text: bool = False
) -> ApiRoute:
    return ApiRoute(method="GET", path=path, handler=handler, need=need, is_polled=is_polled, plain_text=plain_text)


def _generation(method: str, path: str, handler: Handler, body: Body) -> ApiRoute:
    return ApiRoute(method=method, path=path, handler=handler, body=body, streams=True)


def _post(path: str, handler: Handler, body: Body, *, empty: bool = False, required: bool = True) -> ApiRoute:
    return ApiRoute(method="POST", path=path, handler=handler, body=body, empty=empty, body_required=required)


def _admin(
    path: str, handler: Handler, body: Body | None = None, *, required: bool = True, starts: bool = False
) -> ApiRoute:
    """A route that changes the server for every client, reads or writes its disk, or stops it for a while."""
    return ApiRoute(
        method="POST", path=path, handler=handler, need=Access.ADMIN, body=body, body_required=required, starts=starts
    )


_ROUTES = (
    # Open: health for probes, metrics for scrapers (counts and times, no contents).
    _get("/health", health.health, need=Access.NONE, is_polled=True),
    _get("/liveness", health.liveness, need=Access.NONE, is_polled=True),
    _get("/health_generate", health.health_generate, need=Access.NONE, is_polled=True),
    _get("/metrics", info.metrics, need=Access.NONE, is_polled=True, plain_text=True),
    _get("/v1/models", list_models),
    _get("/v1/models/{model}", get_model),
    _get("/model_info", info.model_info),
    _get("/server_info", info.server_info, is_polled=True),
    _get("/v1/loads", info.loads, is_polled=True),
    _get("/get_load", info.old_load, is_polled=True),
    _get("/check", info.check, need=Access.ADMIN),
    _get("/flush_cache", requests.flush_cache, need=Access.ADMIN, plain_text=True),
    _generation("POST", "/v1/completions", completions, CompletionBody),
    _generation("POST", "/v1/chat/completions", chat_completions, ChatBody),
    _generation("POST", "/generate", generate, GenerateBody),
    _generation("PUT", "/generate", generate, GenerateBody),
    _post("/v1/embeddings", embeddings, EmbeddingBody),
    _post("/abort_request", requests.abort_request, requests.AbortBody, empty=True, required=False),
    _post("/tokenize", tokens.tokenize, tokens.TokenizeBody),
    _post("/detokenize", tokens.detokenize, tokens.DetokenizeBody),
    ApiRoute(method="POST", path="/flush_cache", handler=requests.flush_cache, need=Access.ADMIN, plain_text=True),
    _admin("/traces", info.traces, TracesQuery),
    _admin("/pause_generation", engine.pause_generation, engine.PauseBody, required=False),
    _admin("/continue_generation", engine.continue_generation),
    _admin("/update_weights_from_disk", engine.update_weights_from_disk, engine.UpdateWeightsBody),
    _admin("/load_lora_adapter", adapters.load_lora_adapter, adapters.LoadBody),
    _admin("/unload_lora_adapter", adapters.unload_lora_adapter, adapters.UnloadBody),
    _admin("/start_profile", engine.start_profile, engine.StartProfileBody, required=False),
    _admin("/stop_profile", engine.stop_profile),
    _admin("/switch_role", role_switch.switch_role, role_switch.SwitchBody, starts=True),
)
# Second names that SGLang's clients use: its own server has both.
_ALIASES = {
    "/get_model_info": "/model_info",
    "/get_server_info": "/server_info",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}
OPENAPI_PATH = "/openapi.json"
ROUTES = (
    *_ROUTES,
    *(replace(r, path=alias, is_alias=True) for alias, path in _ALIASES.items() for r in _ROUTES if r.path == path),
)
_NEEDS = {OPENAPI_PATH: Access.NONE, **{route.path: route.need for route in ROUTES}}
ADMIN_PATHS = frozenset(path for path, need in _NEEDS.items() if need is Access.ADMIN)


def need_of(path: str) -> Access:
    """The key that a path needs; an unknown path needs an API key."""
    return _NEEDS.get(path, Access.USER)
