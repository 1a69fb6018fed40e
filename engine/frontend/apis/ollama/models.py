"""GET /api/tags, /api/ps, /api/version and POST /api/show."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from engine.frontend.apis.ollama.body import ShowBody
from engine.frontend.apis.ollama.view import timestamp
from engine.frontend.apis.shared.models import choose_model
from engine.frontend.services import SERVICES, Services
from service.http.errors import bad_field, decode_body
from service.http.stream import json_response
from service.model_names import untagged

VERSION = "0.12.6"  # clients check it for features
NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded
_WEIGHTS = (".safetensors", ".gguf")


async def version(request: web.BaseRequest) -> web.Response:
    return json_response({"version": VERSION})


async def tags(request: web.BaseRequest) -> web.Response:
    return json_response({"models": list(_cards(request[SERVICES]))})


async def ps(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    more = {"expires_at": NEVER, "context_length": s.context_length}
    return json_response({"models": [{**card, **more, "size_vram": card["size"]} for card in _cards(s)]})


async def show(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = decode_body(await request.read(), ShowBody)
    name = body.model or body.name
    if not name:
        raise bad_field("model", "is missing")
    chosen = choose_model(s, untagged(name), None)
    kind = str(s.model.info["model_type"])
    return json_response(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in s.model.sampling_defaults.items()),
            "template": "" if s.model.template is None else s.model.template.source,
            "details": _details(s),
            "model_info": {
                "general.architecture": kind,
                "general.basename": chosen.shown,
                f"{kind}.context_length": s.context_length,
            },
            "capabilities": list(_capabilities(s)),
            "modified_at": timestamp(s.started_unix_s),
        }
    )


def _cards(s: Services) -> Iterator[dict[str, Any]]:
    names = {s.model.served_name: s.model.path, **s.leaders.adapters}
    for name, path in names.items():
        version = f"{name}\0{path}\0{s.weight_version}"
        yield {
            "name": name,
            "model": name,
            "modified_at": timestamp(s.started_unix_s),
            "size": _size(Path(path)),
            "digest": hashlib.sha256(version.encode()).hexdigest(),
            "details": _details(s),
        }


def _details(s: Services) -> dict[str, Any]:
    kind = str(s.model.info["model_type"])
    format = "gguf" if s.model.path.endswith(".gguf") else "safetensors"
    return {
        "parent_model": "",
        "format": format,
        "family": kind,
        "families": [kind],
        "parameter_size": "",
        "quantization_level": "",
    }


def _capabilities(s: Services) -> Iterator[str]:
    yield "completion"
    if s.model.vision is not None:
        yield "vision"
    if s.spec.engine.tool_call_parser:
        yield "tools"
    if s.spec.engine.reasoning_parser:
        yield "thinking"


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.glob("*") if file.suffix in _WEIGHTS]
    return sum(file.stat().st_size for file in files)
