"""GET /openapi.json: own routes, and generation as a live worker describes it.

Without worker bodies are plain objects. Fields that the router overwrites are omitted.
"""

from typing import Any

from router.body import ALONE, BOOTSTRAP_FIELDS, HISTORY_FIELD, OLLAMA, PUTS, Api
from router.http.fan_out import ASKED, DESCRIBED, LISTS, LOAD_ADAPTER, TIMEOUTS_S, UNLOAD_ADAPTER
from service.http.openapi import FAILURES, TEXT, answer, document, failures_of, operation
from service.http.routes import EVENTS_TYPE, INVOCATIONS, LINES_TYPE, shape_of

_OVERWRITTEN = (*BOOTSTRAP_FIELDS, HISTORY_FIELD)
_URL = {"url": TEXT}
_WORKER = {**_URL, "role": TEXT, "bootstrap_port": {"type": ["integer", "null"], "minimum": 1, "maximum": 65535}}
_STREAMS: dict[str, str] = {api: LINES_TYPE if api in OLLAMA else EVENTS_TYPE for api in Api if api not in ALONE}
_FAILURES = {
    **FAILURES,
    "408": "the body did not come in time",
    "429": "too many requests; Retry-After says when to come again",
    "502": "a worker could not be reached or broke off",
    "504": "a worker did not answer in time",
}
# path -> method -> schema of the body, None without
_OWN: dict[str, dict[str, Any]] = {
    **{
        path: {"get": None}
        for path in ("/liveness", "/health", "/readiness", "/health_generate", "/metrics", "/version")
    },
    **{path: {"get": None} for path in (*LISTS, *DESCRIBED)},
    **{path: {"get": None} for path in ("/get_server_info", "/server_info", "/get_loads", "/get_load", "/v1/loads")},
    "/ping": {"get": None, "post": None},
    **{path: {"get": None} for path in ("/auto_roles", "/dashboard/state")},
    "/workers": {
        "get": None,
        "post": {"type": "object", "properties": _WORKER, "required": ["url"]},
        "delete": {"type": "object", "properties": _URL, "required": ["url"]},
    },
    "/workers/role": {
        "post": {
            "type": "object",
            "properties": {
                **_URL,
                "role": {"enum": ["prefill", "decode"]},
                "force": {"type": ["boolean", "null"], "default": False},
                "timeout": {"type": ["number", "null"], "minimum": 0},
            },
            "required": ["url", "role"],
        }
    },
    "/workers/migrate": {"post": {"type": "object", "properties": _URL, "required": ["url"]}},
    "/flush_cache": {"get": None, "post": None},
    "/v1/responses/{id}": {"get": None, "delete": None},
    "/v1/responses/{id}/cancel": {"post": None},
    "/v1/responses/{id}/input_items": {"get": None},
    "/traces/{id}": {"get": None},
    "/traces": {
        "post": {
            "type": "object",
            "properties": {"ids": {"type": ["array", "null"], "items": TEXT}, "last": {"type": ["integer", "null"]}},
        }
    },
}
# Passed on unchanged, so the worker describes their bodies.
_PASSED = ("/abort_request", *ASKED, *(path for path in TIMEOUTS_S if path not in _OWN), LOAD_ADAPTER, UNLOAD_ADAPTER)


def make_document(worker: Any) -> dict[str, Any]:
    worker = worker if isinstance(worker, dict) else {}
    paths = {path: {m: _operation(path, body) for m, body in methods.items()} for path, methods in _OWN.items()}
    for path in (*(str(api) for api in Api), INVOCATIONS, *_PASSED):
        paths[path] = {"post": _operation(path, _worker_body(worker, path))}
    for path in PUTS:  # SGLang takes both
        paths[path]["put"] = paths[path]["post"]
    schemas = _inside(worker, "components", "schemas") or {}
    schemas = {name: _without_own(schema) for name, schema in schemas.items()}
    return document("Tandem router", paths=paths, schemas=schemas)


def _operation(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    good = answer("done", plain_text=path == "/metrics", streams=_STREAMS.get(path, ""))
    failures = failures_of(_FAILURES, {})  # a worker's, unchanged
    if path not in _PASSED:
        failures |= failures_of({"400": _FAILURES["400"]}, shape_of(path).schema)
    return operation(path, answers={"200": good, "201": {"description": "added"}}, failures=failures, body=body)


def _worker_body(worker: dict[str, Any], path: str) -> dict[str, Any] | None:
    operation = _inside(worker, "paths", path, "post")
    if operation is not None and "requestBody" not in operation:
        return None
    schema = _inside(worker, "paths", path, "post", "requestBody", "content", "application/json", "schema")
    return schema or {"type": "object"}


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
