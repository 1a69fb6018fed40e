"""GET /openapi.json: own routes, and routes of workers as a live one describes them.

Without a worker their bodies are plain objects. Fields that the router overwrites are omitted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.body import ALONE, BOOTSTRAP_FIELDS, HISTORY_FIELD, OLLAMA, PUTS
from router.body import Api as Generation
from router.client.session import call_worker
from router.http.worker_calls import WorkerCalls
from service.http.api import FAILURES, OPENAPI_PATH, ApiRouter, document, failures_of, json_content
from service.http.errors import decode_or_none
from service.http.request import Handler
from service.http.routes import EVENTS_TYPE, INVOCATIONS, LINES_TYPE, HttpRoute, Tag

TITLE = "Tandem router"
GENERATION = Tag("Generation", "Requests that the router gives to workers.")
WORKERS = Tag("Workers", "The workers behind the router, their roles and loads.")
MODELS = Tag("Models and tokens", "Questions that any worker answers.")
SERVER = Tag("State", "Probes, metrics, requests, and what the dashboard shows.")
OPERATIONS = Tag("Operations", "Orders to all workers.")

_OVERWRITTEN = (*BOOTSTRAP_FIELDS, HISTORY_FIELD)
_FAILURES = {
    **FAILURES,
    "408": "the body did not come in time",
    "429": "too many requests; Retry-After says when to come again",
    "502": "a worker could not be reached or broke off",
    "504": "a worker did not answer in time",
}
_ANY_BODY = {"required": True, "content": json_content({"type": "object"})}
_OF_WORKERS = ("summary", "description", "requestBody")


@dataclass(frozen=True)
class PassedRoute(HttpRoute):
    """A route that workers answer and document."""

    about: str = "Pass on to workers."


passed = partial(PassedRoute, "POST")


def generation_routes(answer: Handler, invoke: Handler) -> Iterable[HttpRoute]:
    for api in Generation:
        streams = "" if api in ALONE else LINES_TYPE if api in OLLAMA else EVENTS_TYPE
        for method in ("POST", "PUT") if api in PUTS else ("POST",):
            yield PassedRoute(method, api.value, answer, streams=streams)
    yield PassedRoute("POST", INVOCATIONS, invoke, streams=EVENTS_TYPE)


def make_document(apis: Sequence[ApiRouter], worker: Any) -> dict[str, Any]:
    """The router's document. `worker`: the document of a worker, None if no one answers."""
    made, worker = document(apis, title=TITLE), worker if isinstance(worker, dict) else {}
    for route in (route for api in apis for route in api.table if not route.is_alias):
        operation = made["paths"][route.path][route.method.lower()]
        known = {} if not isinstance(route, PassedRoute) else failures_of({"400": _FAILURES["400"]}, {})
        failures = failures_of(_FAILURES, {})  # a worker's, unchanged
        operation["responses"] = failures | operation["responses"] | known
        if isinstance(route, PassedRoute):
            operation |= _of_worker(worker, route)
    schemas = _inside(worker, "components", "schemas") or {}
    made["components"]["schemas"] |= {name: _without_own(schema) for name, schema in schemas.items()}
    return made


async def worker_document(calls: WorkerCalls) -> Any:
    """The document of the first live worker, if any, decode first."""
    headers = calls.credentials.own()
    for role in reversed(calls.roles):
        for worker in calls.table.alive(role):
            answer = await call_worker(calls.session, "GET", worker.url + OPENAPI_PATH, headers)
            if answer.status == 200:
                return decode_or_none(answer.body)
    return None


def _of_worker(worker: dict[str, Any], route: HttpRoute) -> dict[str, Any]:
    operation = _inside(worker, "paths", route.path, route.method.lower())
    if operation is None:
        return {"requestBody": _ANY_BODY} if route.method in ("POST", "PUT") else {}
    return {name: operation[name] for name in _OF_WORKERS if name in operation}


def _without_own(schema: Any) -> Any:
    fields = _inside(schema, "properties")
    if fields is None:
        return schema
    return {**schema, "properties": {n: f for n, f in fields.items() if n not in _OVERWRITTEN}}


def _inside(value: Any, *names: str) -> dict[str, Any] | None:
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value if isinstance(value, dict) else None
