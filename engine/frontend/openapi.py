"""GET /openapi.json of a worker, made from the structs that the handlers decode bodies into.

It lists every field with its type and default. Ranges, and fields that exclude each other, are checked by the handlers.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.access import need_of
from engine.frontend.apis.admin.admin import AbortBody, DetokenizeBody, TokenizeBody
from engine.frontend.apis.control.adapters import LoadBody, UnloadBody
from engine.frontend.apis.control.engine import PauseBody, StartProfileBody, UpdateWeightsBody
from engine.frontend.apis.control.role_switch import SwitchBody
from engine.frontend.apis.native.generate import GenerateBody
from engine.frontend.apis.openai.bodies import ChatBody, CompletionBody
from engine.frontend.apis.openai.embeddings import EmbeddingBody
from service.http import openapi
from service.security.keys import Access
from service.telemetry.records import TracesQuery

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/generate": GenerateBody,
    "/abort_request": AbortBody,
    "/traces": TracesQuery,
    "/pause_generation": PauseBody,
    "/update_weights_from_disk": UpdateWeightsBody,
    "/load_lora_adapter": LoadBody,
    "/unload_lora_adapter": UnloadBody,
    "/start_profile": StartProfileBody,
    "/switch_role": SwitchBody,
    "/tokenize": TokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/detokenize": DetokenizeBody,
}
STREAMING = ("/v1/completions", "/v1/chat/completions", "/generate")
OPTIONAL_BODIES = ("/abort_request", "/pause_generation", "/start_profile")
EMPTY_BODIES = ("/flush_cache", "/continue_generation", "/stop_profile")
PLAIN_TEXT = ("/metrics", "/flush_cache")
STARTED = ("/switch_role",)  # 202: the work goes on after the answer
EMPTY_ANSWERS = ("/abort_request",)
SCHEMAS = "#/components/schemas/{name}"


def serve_document(document: bytes) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """The handler of /openapi.json."""

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=document, content_type="application/json")

    return serve


def make_document(gets: Iterable[str], posts: Iterable[str]) -> bytes:
    """The document for these paths, as JSON. A POST without a known body takes any object."""
    _, schemas = msgspec.json.schema_components(list(dict.fromkeys(BODIES.values())), ref_template=SCHEMAS)
    paths: dict[str, dict[str, Any]] = {}
    for path in gets:
        paths.setdefault(path, {})["get"] = _operation(path, body=None)
    for path in posts:
        paths.setdefault(path, {})["post"] = _operation(path, body=_body(path))
    paths["/generate"]["put"] = paths["/generate"]["post"]  # SGLang takes both
    return msgspec.json.encode(openapi.document("Tandem worker", paths=paths, schemas=schemas))


def _body(path: str) -> dict[str, Any] | None:
    if path in EMPTY_BODIES:
        return None
    kind = BODIES.get(path)
    return {"type": "object"} if kind is None else {"$ref": SCHEMAS.format(name=kind.__name__)}


def _operation(path: str, *, body: dict[str, Any] | None) -> dict[str, Any]:
    return openapi.operation(
        path,
        answers={"200": _good(path), **({"202": openapi.answer("started")} if path in STARTED else {})},
        failures=openapi.failures_of(openapi.FAILURES, openapi.ERROR),
        body=body,
        body_required=path not in OPTIONAL_BODIES,
        needs_key=need_of(path) is not Access.NONE,
    )


def _good(path: str) -> dict[str, Any]:
    if path in EMPTY_ANSWERS:
        return {"description": "done"}
    return openapi.answer("done", plain_text=path in PLAIN_TEXT, streams=path in STREAMING)
