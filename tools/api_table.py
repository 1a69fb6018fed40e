"""`make api-table`: writes docs/api.md from the routes and bodies of this tree and from api_anchors.json."""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from engine.frontend.apis.anthropic import body as anthropic
from engine.frontend.apis.chat import body as chat
from engine.frontend.apis.native import body as native
from engine.frontend.apis.native import score
from engine.frontend.apis.ollama import body as ollama
from engine.frontend.apis.openai import completions, embeddings
from engine.frontend.apis.responses import body as responses
from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.routes import ROUTES
from router.compose.router import Router
from router.compose.routes import make_apis
from router.config import RouterConfig
from service.http.api import OPENAPI_PATH
from service.http.body import Body, field_types
from service.http.home import HOME, SHARED
from service.http.routes import UNSERVED
from tests.packages import ROOT

PAGE = ROOT / "docs" / "api.md"
ANCHORS = ROOT / "tools" / "api_anchors.json"  # by tools/api_anchors.py of ad33a56d, from the wheels of both
INSIDE = "/generate sampling_params"
READERS: Mapping[str, BodyReader[Any]] = {
    "/v1/chat/completions": chat.READER,
    "/v1/completions": completions.READER,
    "/v1/embeddings": embeddings.READER,
    "/v1/responses": responses.READER,
    "/v1/messages": anthropic.MESSAGES,
    "/v1/messages/count_tokens": anthropic.COUNT_TOKENS,
    "/api/chat": ollama.CHAT,
    "/api/generate": ollama.GENERATE,
    "/generate": native.READER,
    "/encode": score.ENCODE_READER,
    "/v1/score": score.READER,
}
REFUSED: Mapping[str, Iterable[str]] = {"/v1/responses": responses.MOVED}
HEAD = """# Routes and fields

Written by `make api-table`; do not edit. What a worker and a router serve, beside SGLang {sglang} and vLLM {vllm}, read from the sources
of these versions. `/docs` of a running server describes types and limits; [requests.md](requests.md) says what they are for.

**yes**: served. **refused**: a 400 that says what to do instead. **ignored**: named in the header `X-Tandem-Ignored-Fields`.
**-**: not there.
"""


def page() -> str:
    anchors = json.loads(ANCHORS.read_text())
    text = HEAD.format(**{name: anchor["version"] for name, anchor in anchors.items()})
    text += "\n## Routes\n\n" + _route_table(anchors)
    for path, fields in own_fields().items():
        path_of, _, part = path.partition(" ")
        text += f"\n## Fields of {path_of}{f', {part}' if part else ''}\n\n" + _field_table(path, fields, anchors)
    return text


# ---- this tree


def worker_routes() -> dict[str, set[str]]:
    routes: dict[str, set[str]] = {path: {"GET"} for path in (OPENAPI_PATH, HOME, *_shown(SHARED))}
    for route in ROUTES:
        if route.path in UNSERVED:
            continue
        routes.setdefault(route.path, set()).add(route.method)
    return routes


async def router_routes() -> dict[str, set[str]]:
    async with AsyncExitStack() as stack:
        router = Router(RouterConfig(port=0, pd_disaggregation=True, auto_roles=True), None, stack)
        await router.connect(stack)
        routes = make_apis(router).routes.paths()
    return {path: routes[path] for path in _shown(routes)}


def _shown(paths: Iterable[str]) -> list[str]:
    """Without the files of pages, and what only says that it is not there."""
    return [path for path in paths if path not in UNSERVED and not re.search(r"\.(css|js|svg)$", path)]


def own_fields() -> dict[str, dict[str, str]]:
    """Path -> field -> yes or refused."""
    found: dict[str, dict[str, str]] = {}
    for route in ROUTES:
        if route.body is not None and not route.is_alias and route.path not in found:
            by_reader = READERS[route.path].refused if route.path in READERS else ()
            found[route.path] = _told(route.body, [*by_reader, *REFUSED.get(route.path, ())])
    inside = native.READER.inside
    assert inside is not None
    found[INSIDE] = _told(inside.type, inside.refused)
    return dict(sorted(found.items()))


def _told(body: type[Body], refused: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(field_types(body), "yes") | dict.fromkeys(refused, "refused")


# ---- tables


def _route_table(anchors: Mapping[str, Any]) -> str:
    worker, router = worker_routes(), asyncio.run(router_routes())
    columns = [_by_shape(routes) for routes in (worker, router)]
    columns += [_by_shape(anchors[name]["routes"]) for name in ("sglang", "vllm")]
    shapes = sorted({shape for column in columns for shape in column})
    names = {
        _shape(path): path
        for routes in (anchors["vllm"]["routes"], anchors["sglang"]["routes"], router, worker)
        for path in routes
    }
    rows = [[f"`{names[shape]}`", *(column.get(shape, "-") for column in columns)] for shape in shapes]
    return _table(["path", "worker", "router", "SGLang", "vLLM"], rows)


def _by_shape(routes: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {_shape(path): ", ".join(sorted(methods)) for path, methods in routes.items()}


def _shape(path: str) -> str:
    """The path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def _field_table(path: str, own: Mapping[str, str], anchors: Mapping[str, Any]) -> str:
    theirs = [set(anchors[name]["fields"].get(path, ())) for name in ("sglang", "vllm")]
    absent = "refused" if path == INSIDE else "ignored" if path in READERS else "-"
    rows = [
        [f"`{field}`", own.get(field, absent), *("yes" if field in fields else "-" for fields in theirs)]
        for field in sorted({*own, *theirs[0], *theirs[1]})
    ]
    return _table(["field", "Tandem", "SGLang", "vLLM"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
