"""GET /openapi.json: the worker's API in OpenAPI 3.1, made from the structs that the handlers decode bodies into.

So a field, its type and its default are what the server takes; ranges, and fields that exclude each other, are told by
the 400 that names them.
"""

import re
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
BEGUN = ("/switch_role",)  # what goes on when the answer is there
EMPTY_ANSWERS = ("/abort_request",)
STATUSES = {
    "400": "a field is wrong; `param` names it",
    "401": "the API key is missing or wrong",
    "403": "this needs the admin key; or a web page of another site asks",
    "404": "there is no such model or path",
    "409": "the room is in use, or the worker is changing its role",
    "413": "the body is too long",
    "415": "the body is not declared as JSON",
    "503": "the server is loading, full or going down; try again later",
}
SCHEMAS = "#/components/schemas/{name}"

_PATTERN = re.compile(r"{(\w+)}")

# Of a stream the schema describes each event, as tools read OpenAPI before 3.2.
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail


def serve_document(document: bytes) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """The handler of /openapi.json."""

    async def openapi(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=document, content_type="application/json")

    return openapi


def make_document(gets: Iterable[str], posts: Iterable[str]) -> bytes:
    """The document for these paths, as JSON. A POST without a known body takes any object."""
    (error, *_), components = msgspec.json.schema_components(
        [ErrorAnswer, *dict.fromkeys(BODIES.values())], ref_template=SCHEMAS
    )
    paths: dict[str, dict[str, Any]] = {}
    for path in gets:
        paths.setdefault(path, {})["get"] = _operation(path, error, body=None)
    for path in posts:
        paths.setdefault(path, {})["post"] = _operation(path, error, body=_body(path))
    paths["/generate"]["put"] = paths["/generate"]["post"]  # SGLang takes both
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Tandem worker", "version": "1"},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _body(path: str) -> dict[str, Any] | None:
    if path in EMPTY_BODIES:
        return None
    kind = BODIES.get(path)
    schema = {"type": "object"} if kind is None else {"$ref": SCHEMAS.format(name=kind.__name__)}
    return {"required": path not in OPTIONAL_BODIES, "content": {"application/json": {"schema": schema}}}


def _operation(path: str, error: dict[str, Any], *, body: dict[str, Any] | None) -> dict[str, Any]:
    failures = {status: {"description": text, "content": _json(error)} for status, text in STATUSES.items()}
    names = _PATTERN.findall(path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    return {
        "responses": {"200": _good(path), **_accepted(path), **failures},
        **({"requestBody": body} if body else {}),
        **({"parameters": parameters} if parameters else {}),
        **({"security": [{"key": []}, {}]} if need_of(path) is not Access.NONE else {}),
    }


def _accepted(path: str) -> dict[str, Any]:
    return {"202": {"description": "begun", "content": _json({})}} if path in BEGUN else {}


def _good(path: str) -> dict[str, Any]:
    if path in EMPTY_ANSWERS:
        return {"description": "done"}
    if path in PLAIN_TEXT:
        return {"description": "done", "content": {"text/plain": {"schema": {"type": "string"}}}}
    streams = {"text/event-stream": {"schema": EVENT}} if path in STREAMING else {}
    return {"description": "done", "content": {**_json({}), **streams}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
