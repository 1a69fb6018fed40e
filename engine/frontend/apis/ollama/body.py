"""Bodies of /api/chat, /api/generate and /api/show. Pure.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from typing import Any

import msgspec

from engine.frontend.apis.chat.body import READER, ChatBody, ChatMessage, ContentPart, PlacedPart
from engine.frontend.apis.chat.plan import TOGGLES
from engine.frontend.apis.chat.tools import Tool
from engine.frontend.apis.shared.body_reader import BodyReader, Inside, Unserved, missing_in
from engine.frontend.apis.shared.constraints import JsonSchemaFormat, ResponseFormat
from engine.frontend.apis.shared.fields import Mixed, OwnFields, RequestFields, own_fields
from service.flags import untagged
from service.http.errors import bad_field


class IgnoredOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of Ollama's own runner."""

    draft_num_predict: Any = None
    embedding_only: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    low_vram: Any = None
    main_gpu: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    num_batch: Any = None
    num_ctx: Any = None
    num_gpu: Any = None
    num_keep: Any = None
    num_thread: Any = None
    numa: Any = None
    penalize_newline: Any = None
    repeat_last_n: Any = None
    use_mlock: Any = None
    use_mmap: Any = None
    vocab_only: Any = None


class Options(IgnoredOptions, kw_only=True, forbid_unknown_fields=True):
    """Sampling options first, then unsupported ones, rejected unless off."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class OllamaFields(msgspec.Struct, OwnFields, metaclass=Mixed, kw_only=True):
    """Fields of both endpoints.

    `format`: "json" or a JSON schema. `think`: reasoning, or its effort. `keep_alive` is ignored.
    """

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: Any = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaFields, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateBody(OllamaFields, kw_only=True):
    """Body of /api/generate. `raw`: do not apply the chat template."""

    prompt: str | None = None
    images: list[str] | None = None
    system: str | None = None
    raw: bool | None = None


class ShowBody(msgspec.Struct, kw_only=True):
    """Body of /api/show. `name`: older clients' name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


_INSIDE = Inside(field="options", type=Options, refused={})
_REFUSED = missing_in(OllamaChatBody, READER, "put it into options if it is there, or ask /v1/chat/completions")
CHAT = BodyReader(body=OllamaChatBody, refused=_REFUSED, looked_into=("messages", "tools"), inside=_INSIDE)
GENERATE = BodyReader(
    body=OllamaGenerateBody,
    refused={
        **missing_in(OllamaGenerateBody, CHAT, "ask /api/chat"),
        "context": Unserved("send the conversation to /api/chat"),
        "suffix": Unserved("leave it out; this server completes at the end alone"),
        "template": Unserved("render the prompt yourself and send it raw"),
    },
    inside=_INSIDE,
)


# ---- Ollama's bodies as chats and completions. Pure.

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high")
_OFF = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}  # values without effect
_SAMPLED = ("temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
# Our names -> Ollama's, in errors.
NAMES = {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in (*_SAMPLED, "top_k", "seed")},
}


def chat_of(body: OllamaChatBody) -> ChatBody:
    """Raises ApiError(400) that names the field, like checks in `in_words_of(NAMES)`."""
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages or [])]
    last = messages[-1] if messages else None
    return ChatBody(
        messages=messages,
        tools=body.tools or None,
        continue_final_message=last is not None and last.role == "assistant" and not last.tool_calls,
        **_thinking(body.think),
        **_shared(body),
    )


def prompted_chat_of(body: OllamaGenerateBody) -> ChatBody:
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    messages = [*system, ChatMessage(role="user", content=_content(body.prompt, body.images, "images"))]
    return ChatBody(messages=messages, **_thinking(body.think), **_shared(body))


def completion_of(body: OllamaGenerateBody) -> RequestFields:
    if body.images:
        raise bad_field("images", "needs a chat template; this prompt has none (raw, or the model has no template)")
    if body.system:
        raise bad_field("system", "needs a chat template; this prompt has none (raw, or the model has no template)")
    return RequestFields(**_shared(body))


def _shared(body: OllamaFields) -> dict[str, Any]:
    return {
        **own_fields(body),
        **_sampling(body.options or Options()),
        "model": untagged(body.model),
        "stream": body.stream is not False,
        "response_format": _format(body.format),
    }


def _sampling(options: Options) -> dict[str, Any]:
    """In Ollama, numbers <= 0 mean no token limit, no top_k and a random seed."""
    for name, off in _OFF.items():
        if getattr(options, name) not in (None, off):
            message = "is not supported by this server; leave it out"
            raise bad_field(f"options.{name}", message, code="unsupported_parameter")
    limit, top_k, seed = options.num_predict, options.top_k, options.seed
    return {
        **{name: getattr(options, name) for name in _SAMPLED},
        "max_tokens": limit if limit and limit > 0 else None,
        "top_k": -1 if top_k is not None and top_k <= 0 else top_k,
        "seed": seed if seed is not None and seed >= 0 else None,
        "repetition_penalty": options.repeat_penalty,
    }


def _format(format: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not format:
        return None
    if isinstance(format, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=format))
    if format != "json":
        raise bad_field("format", f"must be json or a JSON schema, got {format[:40]!r}")
    return ResponseFormat(type="json_object")


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"chat_template_kwargs": dict.fromkeys(TOGGLES, think)}
    if think not in EFFORTS:
        raise bad_field("think", f"must be true, false, {', '.join(EFFORTS)}; got {think[:40]!r}")
    return {"reasoning_effort": think}


def _message(message: OllamaMessage, field: str) -> ChatMessage:
    if message.role not in ROLES:
        raise bad_field(f"{field}.role", f"{message.role!r} is not one of {', '.join(ROLES)}")
    content = _content(message.content, message.images, f"{field}.images")
    if message.role == "assistant" and message.thinking:
        content = content or None  # an answer that ended in its reasoning: Ollama has no null
    return ChatMessage(
        role=message.role,
        content=content,
        reasoning_content=message.thinking or None,
        tool_calls=[{"type": "function", **call} for call in message.tool_calls or []] or None,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
    )


def _content(text: str | None, images: list[str] | None, field: str) -> str | list[ContentPart] | None:
    if not images:
        return text
    parts: list[ContentPart] = [
        PlacedPart(type="image_url", image_url=image, is_base64=True, field=f"{field}[{i}]")
        for i, image in enumerate(images)
    ]
    return [*parts, ContentPart(type="text", text=text)] if text else parts
