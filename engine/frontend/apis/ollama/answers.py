"""POST /api/chat and /api/generate: body -> chat or completion -> view."""

import hashlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
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
from engine.frontend.apis.shared.body_reader import beside_loop, in_words_of
from engine.frontend.apis.shared.fields import choose_model, prompts_ids
from engine.frontend.apis.shared.resumable import ids_of
from engine.frontend.apis.shared.routes import RouteTags, get_route, post_route, token_route
from engine.frontend.apis.shared.samples import (
    AnswerFormat,
    Head,
    SamplesPlan,
    answer_samples,
    body_constraint,
    sampling_of,
)
from engine.frontend.apis.shared.stream import Framing, View
from engine.frontend.services import SERVICES, Services
from engine.text.sample import (
    Arguments,
    CallBegins,
    Part,
    PlainText,
    ReasoningText,
    TextAnswers,
    TextOutput,
    ToolCall,
    WholeAnswer,
    joined,
)
from service.flags import untagged
from service.http.api import ApiRouter
from service.http.errors import missing, object_of, read_body
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


# ---- Answers: objects with increments, the last with counts and times.

Show = Callable[[WholeAnswer], dict[str, Any]]


class OllamaView(View):
    """`model`: as requested; `start_ns`: arrival. `show`: renders text, reasoning and calls."""

    def __init__(self, answers: TextAnswers, head: Head, *, model: str, start_ns: int, show: Show) -> None:
        self._answers = answers
        self._usage = head.usage
        self._model = model
        self._start_ns = start_ns
        self._show = show
        self._call: ToolCall | None = None  # its arguments are shown whole

    def body(self, answers: list[TextOutput]) -> dict[str, Any]:
        return self._last(joined(self._parts(answers[0])), answers[0])

    def chunks(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        news = [new for part in self._parts(output) for new in self._news(part)]
        if output.tokens.finish is None:
            return [self._chunk(new) for new in news]
        return [*map(self._chunk, [*news, *self._ended_call()]), self._last(WholeAnswer(), output)]

    def _parts(self, output: TextOutput) -> list[Part]:
        self._usage.add(0, output)
        return self._answers.read(0, output)

    def _news(self, part: Part) -> list[WholeAnswer]:
        match part:
            case PlainText(text):
                return [*self._ended_call(), WholeAnswer(text=text)]
            case ReasoningText(text):
                return [*self._ended_call(), WholeAnswer(reasoning=text)]
            case CallBegins(_, name, id):
                ended, self._call = self._ended_call(), ToolCall(name, id)
                return ended
            case Arguments(_, text):
                assert self._call is not None
                self._call.arguments += text
                return []

    def _ended_call(self) -> list[WholeAnswer]:
        call, self._call = self._call, None
        return [] if call is None else [WholeAnswer(calls=[call])]

    def _chunk(self, new: WholeAnswer) -> dict[str, Any]:
        return {**_head(self._model), **self._show(new), "done": False}

    def _last(self, shown: WholeAnswer, output: TextOutput) -> dict[str, Any]:
        finish, counts, times = output.tokens.finish, self._usage.total(), output.tokens.times
        assert finish is not None
        return {
            **_head(self._model),
            **self._show(shown),
            "done": True,
            "done_reason": finish.kind,
            "total_duration": time.monotonic_ns() - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": counts.prompt,
            "prompt_eval_duration": _nanoseconds(times.get("prefill_time")),
            "eval_count": counts.completion,
            "eval_duration": _nanoseconds(times.get("decode_time")),
        }


def loaded(model: str, shown: dict[str, Any]) -> dict[str, Any]:
    """The answer without a prompt, which loads the model in Ollama."""
    return {**_head(model), **shown, "done": True, "done_reason": "load"}


def chat_message(answer: WholeAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["thinking"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return {"message": message}


def response_text(answer: WholeAnswer) -> dict[str, Any]:
    return {"response": answer.text, **({"thinking": answer.reasoning} if answer.reasoning else {})}


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(time.time())}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": object_of(call.arguments.encode())}
    return {"id": call.id, "function": function}


def _nanoseconds(seconds: Any) -> int:
    return int(seconds * 1e9) if isinstance(seconds, int | float) else 0


# ---- chats and prompts

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
