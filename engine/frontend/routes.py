"""Routes of a worker, and their OpenAPI document."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.admin import control, health, info, role_switch, tokens
from engine.frontend.apis.anthropic.body import CountTokensBody, MessagesBody
from engine.frontend.apis.anthropic.messages import count_tokens, messages
from engine.frontend.apis.chat.body import ChatBody
from engine.frontend.apis.native.body import GenerateBody
from engine.frontend.apis.native.generate import generate
from engine.frontend.apis.native.score import EncodeBody, ScoreBody, encode, score
from engine.frontend.apis.ollama import answers as ollama
from engine.frontend.apis.ollama.body import OllamaChatBody, OllamaGenerateBody, ShowBody
from engine.frontend.apis.openai.chat import chat_completions
from engine.frontend.apis.openai.completions import (
    CompletionBody,
    completions,
    render_chat_completion,
    render_completion,
)
from engine.frontend.apis.openai.embeddings import EmbeddingBody, embeddings
from engine.frontend.apis.openai.ranking import ClassifyBody, PairScoreBody, RerankBody, classify, rerank, score_pairs
from engine.frontend.apis.responses import create
from engine.frontend.apis.responses.body import ResponseBody
from engine.frontend.apis.shared.retained import kept_stream
from service.http import openapi
from service.http.api_shapes import EVENTS_TYPE, LINES_TYPE, shape_of
from service.http.heartbeats import PATH as HEARTBEATS
from service.http.home import CHAT, HOME, SHARED
from service.http.reconnect import RETAINED_PATH
from service.http.resume import MOVE_OUT
from service.http.routes import INVOCATIONS, UNSERVED, Handler, InvocationBody, invoked_path, refuse
from service.security.keys import Access
from service.telemetry.records import TracesQuery
from service.waiter import BODIES

SCHEMAS = "#/components/schemas/{name}"


@dataclass(frozen=True)
class ApiRoute:
    """A route.

    `need`: required key. `is_polled`: successes are not logged. `anywhere`: on any frontend.
    `computes`: needs the text model. For OpenAPI: `is_alias` (left out), `streams` (content type),
    `plain_text` or `empty` answers, `starts`: work continues after a 202.
    """

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    body_required: bool = True
    need: Access = Access.USER
    is_polled: bool = False
    anywhere: bool = False
    computes: bool = False
    is_alias: bool = False
    streams: str = ""
    plain_text: bool = False
    empty: bool = False
    starts: bool = False


async def invocations(request: web.BaseRequest) -> web.StreamResponse:
    data = await request.read()
    path = await BODIES.run(partial(invoked_path, data), size=len(data))
    return await _HANDLERS["POST", path](request)


_open = partial(ApiRoute, "GET", need=Access.NONE, is_polled=True)  # health and metrics, without user data
_tokens = partial(ApiRoute, "POST", anywhere=True, computes=True)
_admin = partial(ApiRoute, "POST", need=Access.ADMIN)  # affects every client, writes to disk, or stops the server

_ROUTES = (
    _open("/health", health.health),
    _open("/liveness", health.liveness, anywhere=True),
    replace(_open(HEARTBEATS, health.heartbeats), is_alias=True),  # for routers
    _open("/health_generate", health.health_generate),
    _open("/metrics", info.metrics, plain_text=True),
    _open("/ping", health.health),
    ApiRoute("POST", "/ping", health.health, need=Access.NONE, is_polled=True),
    _open("/version", info.version),
    ApiRoute("GET", "/v1/models", info.list_models),
    ApiRoute("GET", "/v1/models/{model}", info.get_model),
    ApiRoute("GET", "/model_info", info.model_info),
    ApiRoute("GET", "/server_info", info.server_info, is_polled=True),
    ApiRoute("GET", "/v1/loads", info.loads, is_polled=True),
    ApiRoute("GET", "/get_load", info.old_load, is_polled=True),
    ApiRoute("GET", "/check", info.check, need=Access.ADMIN),
    ApiRoute("GET", "/flush_cache", control.flush_cache, need=Access.ADMIN, plain_text=True),
    _tokens("/v1/completions", completions, CompletionBody, streams=EVENTS_TYPE),
    _tokens("/v1/chat/completions", chat_completions, ChatBody, streams=EVENTS_TYPE),
    _tokens("/v1/completions/render", render_completion, CompletionBody, computes=False),
    _tokens("/v1/chat/completions/render", render_chat_completion, ChatBody, computes=False),
    ApiRoute("POST", "/v1/responses", create.create_response, ResponseBody, streams=EVENTS_TYPE, computes=True),
    ApiRoute("GET", "/v1/responses/{id}", create.get_response),
    ApiRoute("DELETE", "/v1/responses/{id}", create.delete_response),
    ApiRoute("POST", "/v1/responses/{id}/cancel", create.cancel_response),
    ApiRoute("GET", "/v1/responses/{id}/input_items", create.list_input_items),
    _tokens("/generate", generate, GenerateBody, streams=EVENTS_TYPE),
    ApiRoute("PUT", "/generate", generate, GenerateBody, streams=EVENTS_TYPE, anywhere=True, computes=True),
    _tokens("/v1/embeddings", embeddings, EmbeddingBody),
    _tokens("/encode", encode, EncodeBody),
    ApiRoute("PUT", "/encode", encode, EncodeBody, anywhere=True, computes=True),
    _tokens("/v1/score", score, ScoreBody),
    _tokens("/v1/rerank", rerank, RerankBody),
    _tokens("/score", score_pairs, PairScoreBody),
    _tokens("/classify", classify, ClassifyBody),
    _tokens("/v1/messages", messages, MessagesBody, streams=EVENTS_TYPE),
    _tokens("/v1/messages/count_tokens", count_tokens, CountTokensBody, computes=False),
    _tokens(INVOCATIONS, invocations, InvocationBody, streams=EVENTS_TYPE),
    _tokens("/api/chat", ollama.chat, OllamaChatBody, streams=LINES_TYPE),
    _tokens("/api/generate", ollama.generate, OllamaGenerateBody, streams=LINES_TYPE),
    ApiRoute("POST", "/api/show", ollama.show, ShowBody),
    ApiRoute("GET", "/api/tags", ollama.tags),
    ApiRoute("GET", "/api/ps", ollama.ps),
    ApiRoute("GET", "/api/version", ollama.version),
    ApiRoute("POST", "/abort_request", control.abort_request, control.AbortBody, empty=True, body_required=False),
    ApiRoute("POST", RETAINED_PATH, kept_stream, is_alias=True),  # for routers
    ApiRoute("POST", MOVE_OUT, control.move_out, control.MoveOutBody),
    _tokens("/tokenize", tokens.tokenize, tokens.TokenizeBody, computes=False),
    _tokens("/detokenize", tokens.detokenize, tokens.DetokenizeBody, computes=False),
    _admin("/flush_cache", control.flush_cache, plain_text=True),
    _admin("/traces", info.traces, TracesQuery),
    _admin("/pause_generation", control.pause_generation, control.PauseBody, body_required=False),
    _admin("/continue_generation", control.continue_generation),
    _admin("/update_weights_from_disk", control.update_weights_from_disk, control.UpdateWeightsBody),
    _admin("/release_memory_occupation", control.release_memory_occupation, control.MemoryBody, body_required=False),
    _admin("/resume_memory_occupation", control.resume_memory_occupation, control.MemoryBody, body_required=False),
    _admin("/load_lora_adapter", control.load_lora_adapter, control.LoadBody),
    _admin("/unload_lora_adapter", control.unload_lora_adapter, control.UnloadBody),
    _admin("/start_profile", control.start_profile, control.StartProfileBody, body_required=False),
    _admin("/stop_profile", control.stop_profile),
    _admin("/start_expert_distribution_record", control.start_expert_record),
    _admin("/stop_expert_distribution_record", control.stop_expert_record),
    _admin(
        "/dump_expert_distribution_record", control.dump_expert_record, control.DumpExpertsBody, body_required=False
    ),
    _admin("/switch_role", role_switch.switch_role, role_switch.SwitchBody, starts=True),
)
# second names in SGLang and vLLM
_ALIASES = {
    "/get_model_info": "/model_info",
    "/get_server_info": "/server_info",
    "/loads": "/v1/loads",  # SMG's first choice
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/v1/classify": "/classify",
}
OPENAPI_PATH = "/openapi.json"
ROUTES = (
    *_ROUTES,
    *(ApiRoute("POST", path, refuse, is_alias=True) for path in UNSERVED),
    *(replace(r, path=alias, is_alias=True) for alias, path in _ALIASES.items() for r in _ROUTES if r.path == path),
)
_HANDLERS = {(route.method, route.path): route.handler for route in ROUTES}
_NEEDS = {
    OPENAPI_PATH: Access.NONE,
    HOME: Access.NONE,
    **dict.fromkeys(SHARED | CHAT, Access.NONE),
    **{route.path: route.need for route in ROUTES},
}
ADMIN_PATHS = frozenset(path for path, need in _NEEDS.items() if need is Access.ADMIN)


def need_of(path: str) -> Access:
    """Unknown paths need an API key."""
    return _NEEDS.get(path, Access.USER)


def make_document(routes: Iterable[ApiRoute]) -> bytes:
    routes = [route for route in routes if not route.is_alias]
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    _, schemas = msgspec.json.schema_components(bodies, ref_template=SCHEMAS)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return msgspec.json.encode(openapi.document("Tandem worker", paths=paths, schemas=schemas))


def _operation(route: ApiRoute) -> dict[str, Any]:
    good = openapi.answer("done", plain_text=route.plain_text, streams=route.streams)
    return openapi.operation(
        route.path,
        answers={
            "200": {"description": "done"} if route.empty else good,
            **({"202": openapi.answer("started")} if route.starts else {}),
        },
        failures=openapi.failures_of(openapi.FAILURES, shape_of(route.path).schema),
        body=None if route.body is None else {"$ref": SCHEMAS.format(name=route.body.__name__)},
        body_required=route.body_required,
        needs_key=route.need is not Access.NONE,
    )
