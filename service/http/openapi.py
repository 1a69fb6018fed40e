"""Common parts of our OpenAPI 3.1 documents. Pure."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from service.flags import installed_version
from service.http.routes import EVENTS_TYPE, HttpRoute, shape_of
from service.security.keys import Access

TEXT = {"type": "string"}
# The schema of a stream describes each event, as before OpenAPI 3.2.
EVENT = {"type": "object", "properties": {"data": TEXT}, "required": ["data"]}
FAILURES = {
    "400": "the body is wrong; the message names the field",
    "401": "the API key is missing or wrong",
    "403": "this needs the admin key; or a web page of another site sent it",
    "404": "there is no such model or path",
    "409": "not in this state: a room is in use, or a worker changes its role",
    "413": "the body is too long",
    "415": "the body is not declared as JSON",
    "503": "no server can take this now; try again later",
}

SCHEMAS = "#/components/schemas/{name}"
_PATTERN = re.compile(r"{(\w+)}")


def operation(route: HttpRoute) -> dict[str, Any]:
    """Return the part of a route's operation that follows from its fields."""
    parameters = [{"name": n, "in": "path", "required": True, "schema": TEXT} for n in _PATTERN.findall(route.path)]
    good = (
        {"description": "done"} if route.empty else answer("done", plain_text=route.plain_text, streams=route.streams)
    )
    body = {} if route.body is None else json_content({"$ref": SCHEMAS.format(name=route.body.__name__)})
    failures = failures_of(FAILURES, shape_of(route.path).schema)
    return {
        "responses": {"200": good, **({"202": answer("started")} if route.starts else {}), **failures},
        **({} if route.body is None else {"requestBody": {"required": route.body_required, "content": body}}),
        **({"parameters": parameters} if parameters else {}),
        **({} if route.need is Access.NONE else {"security": [{"key": []}, {}]}),
    }


def answer(description: str, *, plain_text: bool = False, streams: str = "") -> dict[str, Any]:
    """Return an answer with JSON or text, or with a stream."""
    if plain_text:
        return {"description": description, "content": {"text/plain": {"schema": TEXT}}}
    events = {streams: {"schema": EVENT if streams == EVENTS_TYPE else {}}} if streams else {}
    return {"description": description, "content": {**json_content({}), **events}}


def failures_of(texts: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    return {status: {"description": text, "content": json_content(schema)} for status, text in texts.items()}


def json_content(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


# ---- The body of GET /v1/loads, as in SGLang.


def loads_answer(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row per rank. The time is text, as SMG rejects numbers."""
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": installed_version(),
        "dp_rank_count": len(rows),
        "loads": rows,
    }
