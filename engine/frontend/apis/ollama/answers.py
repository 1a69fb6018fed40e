"""POST /api/chat and /api/generate: body -> chat or completion -> view."""

import hashlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Response

from engine.frontend.apis.chat.body import ChatBody
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.ollama.body import (
    CHAT,
    GENERATE,
    NAMES,
    OllamaChatBody,
    OllamaFields,
    OllamaGenerateBody,
    ShowBody,
    chat_of,
    completion_of,
    prompted_chat_of,
)
from engine.frontend.apis.ollama.view import (
    OllamaView,
    Show,
    chat_message,
    loaded,
    response_text,
    timestamp,
)
from engine.frontend.apis.shared.body_reader import beside_loop, in_words_of
from engine.frontend.apis.shared.fields import choose_model, prompts_ids
from engine.frontend.apis.shared.resumable import ids_of
from engine.frontend.apis.shared.routes import RouteTags, get_route, post_route, token_route
from engine.frontend.apis.shared.samples import AnswerFormat, SamplesPlan, answer_samples, body_constraint, sampling_of
from engine.frontend.apis.shared.stream import Framing
from engine.frontend.services import SERVICES, Services
from engine.text.sample import TextAnswers, WholeAnswer
from service.flags import untagged
from service.http.api import ApiRouter
from service.http.errors import missing, read_body
from service.http.request import HttpRequest
from service.http.routes import LINES_HEADERS, LINES_TYPE, json_response, line

API = ApiRouter(RouteTags.OLLAMA)

# ---- GET /api/tags, /api/ps, /api/version and POST /api/show.

VERSION = "0.12.6"  # clients check it for features
NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded
_WEIGHTS = (".safetensors", ".gguf")


@API.on(get_route, "/api/version")
async def version(request: HttpRequest) -> Response:
    """Return the version."""
    return json_response({"version": VERSION})


@API.on(get_route, "/api/tags")
async def tags(request: HttpRequest) -> Response:
    """List models."""
    return json_response({"models": list(_cards(request[SERVICES]))})


@API.on(get_route, "/api/ps")
async def ps(request: HttpRequest) -> Response:
    """List loaded models."""
    s = request[SERVICES]
    more = {"expires_at": NEVER, "context_length": s.context_length}
    return json_response({"models": [{**card, **more, "size_vram": card["size"]} for card in _cards(s)]})


@API.on(post_route, "/api/show", ShowBody)
async def show(request: HttpRequest) -> Response:
    """Describe a model."""
    s = request[SERVICES]
    body = read_body(await request.read(), ShowBody)
    name = body.model or body.name
    if not name:
        raise missing("model")
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


# ---- answers

LINES = Framing(headers=LINES_HEADERS, encode=line)
_FORMAT = AnswerFormat(id_prefix="chat-", framing=LINES, cut=True)
_RAW_FORMAT = AnswerFormat(id_prefix="gen-", field="prompt", framing=LINES, cut=True)


@API.on(token_route, "/api/chat", OllamaChatBody, streams=LINES_TYPE)
async def chat(request: HttpRequest) -> Response:
    """Answer a chat."""
    start_ns = time.monotonic_ns()
    body = await CHAT.read(request)
    with in_words_of(NAMES):
        if not body.messages:
            return _loaded(request[SERVICES], body, chat_message)
        return await _answer_chat(
            request, body, await beside_loop(request, partial(chat_of, body)), show=chat_message, start_ns=start_ns
        )


@API.on(token_route, "/api/generate", OllamaGenerateBody, streams=LINES_TYPE)
async def generate(request: HttpRequest) -> Response:
    """Continue a text.

    The prompt is raw without a chat template.
    """
    start_ns, s = time.monotonic_ns(), request[SERVICES]
    body = await GENERATE.read(request)
    with in_words_of(NAMES):
        if not body.prompt:
            return _loaded(s, body, response_text)
        if body.raw or s.model.template is None:
            return await _complete(request, body, body.prompt, start_ns=start_ns)
        return await _answer_chat(request, body, prompted_chat_of(body), show=response_text, start_ns=start_ns)


async def _answer_chat(
    request: HttpRequest, body: OllamaFields, chat: ChatBody, *, show: Show, start_ns: int
) -> Response:
    plan = await plan_chat(request[SERVICES], chat)
    answers = plan.answers(ids_of(request).mint, "call_")
    view = partial(OllamaView, answers, model=body.model, start_ns=start_ns, show=show)
    return await answer_samples(request, chat, plan, _FORMAT, view=view)


async def _complete(request: HttpRequest, body: OllamaGenerateBody, prompt: str, *, start_ns: int) -> Response:
    s, fields = request[SERVICES], completion_of(body)
    model, constraint = choose_model(s, fields.model, fields.lora_path), body_constraint(fields)
    plan = SamplesPlan(
        prompts=await prompts_ids(s, [prompt], field="prompt"),
        sampling=sampling_of(s, fields, max_tokens=fields.max_tokens, name="max_tokens", constraint=constraint),
        constraint=constraint,
        logprobs=None,
        model=model,
    )
    view = partial(OllamaView, TextAnswers(), model=body.model, start_ns=start_ns, show=response_text)
    return await answer_samples(request, fields, plan, _RAW_FORMAT, view=view)


def _loaded(s: Services, body: OllamaFields, show: Show) -> Response:
    choose_model(s, untagged(body.model), body.lora_path)
    shown: dict[str, Any] = show(WholeAnswer())
    return json_response(loaded(body.model, shown))
