"""Routes of a worker, and their OpenAPI document."""

from dataclasses import replace
from functools import partial

from fastapi import Response

from engine.frontend.apis.admin import control, health, info, role_switch, tokens, weights
from engine.frontend.apis.anthropic import messages
from engine.frontend.apis.native import generate, score
from engine.frontend.apis.ollama import answers as ollama
from engine.frontend.apis.openai import chat, completions, embeddings, ranking
from engine.frontend.apis.responses import create
from engine.frontend.apis.shared import conversations, retained
from engine.frontend.apis.shared.routes import ApiRoute, RouteTags, token_route
from service.http.api import OPENAPI_PATH, ApiRouter
from service.http.home import CHAT, HOME, SHARED
from service.http.request import HttpRequest
from service.http.routes import EVENTS_TYPE, INVOCATIONS, UNSERVED, InvocationBody, invoked_path, refuse
from service.security.keys import Access
from service.waiter import BODIES


async def invocations(request: HttpRequest) -> Response:
    """Answer a body of any of these APIs (SageMaker)."""
    data = await request.read()
    path = await BODIES.run(partial(invoked_path, data), size=len(data))
    return await _HANDLERS["POST", path](request)


APIS: tuple[ApiRouter, ...] = (
    *(chat.API, completions.API, create.API, messages.API, generate.API, score.API, embeddings.API, ranking.API),
    *(ollama.API, tokens.API, info.API, health.API, control.API, weights.API, role_switch.API, retained.API),
    conversations.API,
    ApiRouter(RouteTags.CHATS, (token_route(INVOCATIONS, invocations, InvocationBody, streams=EVENTS_TYPE),)),
)
ORDERS: dict[str, control.Order] = {**control.ORDERS, **weights.ORDERS}
_ROUTES = tuple(route for api in APIS for route in api.table if isinstance(route, ApiRoute))
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
