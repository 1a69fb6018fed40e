"""GET /openapi.json of a worker, from its table of routes and the structs that bodies are decoded into."""

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.frontend.routes import ApiRoute
from service.http import openapi
from service.security.keys import Access

SCHEMAS = "#/components/schemas/{name}"


def make_document(routes: Iterable[ApiRoute]) -> bytes:
    """The document, as JSON."""
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
        failures=openapi.failures_of(openapi.FAILURES, openapi.ERROR),
        body=None if route.body is None else {"$ref": SCHEMAS.format(name=route.body.__name__)},
        body_required=route.body_required,
        needs_key=route.need is not Access.NONE,
    )
