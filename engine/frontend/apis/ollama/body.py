"""Bodies of /api/chat, /api/generate and /api/show. Pure.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from typing import Any

from engine.frontend.apis.chat.body import READER, ChatBody, ChatMessage, ContentPart, PlacedPart
from engine.frontend.apis.chat.plan import TOGGLES
from engine.frontend.apis.chat.tools import Tool
from engine.frontend.apis.shared.body_reader import BodyReader, Inside, Unserved, missing_in
from engine.frontend.apis.shared.constraints import JsonSchemaFormat, ResponseFormat
from engine.frontend.apis.shared.request_body import OwnFields, RequestFields, own_fields
from service.flags import untagged
from service.http.body import Body, ClosedBody, optional, required
from service.http.errors import bad_field, check_choice, unsupported


class IgnoredOptions(ClosedBody):
    """Options of Ollama's own runner."""

    draft_num_predict: Any = optional("Tokens that a draft model proposes. Not used: a flag of the server sets it.", 5)
    embedding_only: Any = optional("Loads a model for embeddings alone. Not used.", False)
    f16_kv: Any = optional("KV in 16 bits. Not used: --kv-cache-dtype sets it.", True)
    logits_all: Any = optional("Logits of all tokens. Not used.", False)
    low_vram: Any = optional("Saves device memory. Not used: --mem-fraction-static sets it.", False)
    main_gpu: Any = optional("Device of the model. Not used.", 0)
    mirostat_eta: Any = optional("Learning rate of mirostat. Not used.", 0.1)
    mirostat_tau: Any = optional("Target entropy of mirostat. Not used.", 5.0)
    num_batch: Any = optional("Prompt tokens of a step. Not used: --chunked-prefill-size sets it.", 512)
    num_ctx: Any = optional("Length of the context. Not used: --context-length sets it.", 4096)
    num_gpu: Any = optional("Layers on the device. Not used: all of them are.", 99)
    num_keep: Any = optional("Prompt tokens that stay when the context is full. Not used.", 4)
    num_thread: Any = optional("CPU threads of a step. Not used.", 8)
    numa: Any = optional("Places memory by CPU node. Not used.", False)
    penalize_newline: Any = optional("False: line breaks get no penalty. Not used: all tokens get it.", True)
    repeat_last_n: Any = optional("Tokens that penalties look at. Not used: they look at the whole answer.", 64)
    use_mlock: Any = optional("Keeps weights in memory. Not used.", False)
    use_mmap: Any = optional("Maps the file of weights. Not used.", True)
    vocab_only: Any = optional("Loads the vocabulary alone. Not used.", False)


class Options(IgnoredOptions):
    """Sampling options first, then unsupported ones, rejected unless off."""

    num_predict: int | None = optional("Most tokens of the answer. Default, and at 0 or less: what fits.", 128)
    temperature: float | None = optional("Randomness, at least 0: 0 always takes the likeliest token.", 0.7)
    top_k: int | None = optional("Samples from this many of the likeliest tokens. 0 or less: from all.", 40)
    top_p: float | None = optional(
        "Samples from the likeliest tokens whose probabilities add up to this. Above 0, up to 1.", 0.9
    )
    min_p: float | None = optional("Leaves out tokens less likely than this share of the likeliest one. 0 to 1.", 0.05)
    seed: int | None = optional("The same seed gives the same answer. Below 0: the server chooses one.", 42)
    stop: str | list[str] | None = optional("Texts that end the answer, which leaves them out.", ["\n\n"])
    repeat_penalty: float | None = optional(
        "Divides logits of tokens that occurred before: above 1 avoids repetition. Above 0, up to 2; default 1.", 1.1
    )
    presence_penalty: float | None = optional(
        "Subtracted from the logit of each token that is in the answer. -2 to 2; default 0.", 0.5
    )
    frequency_penalty: float | None = optional(
        "Subtracted from a token's logit for each time that it is in the answer. -2 to 2; default 0.", 0.5
    )

    mirostat: int | None = optional("Another way to sample. Not supported: only 0 (off).", 0)
    tfs_z: float | None = optional("Tail free sampling. Not supported: only 1 (off).", 1)
    typical_p: float | None = optional("Typical sampling. Not supported: only 1 (off).", 1)


class OllamaFields(OwnFields):
    model: str = required("Name of the model or of a LoRA adapter; it may end in :latest.", "smollm2:latest")
    stream: bool | None = optional("False: one answer. Default true: lines of JSON.", False)
    format: str | dict[str, Any] | None = optional("Format of the answer: json, or a JSON schema.", "json")
    options: Options | None = optional(
        "Options of sampling. What is left out is the model's default. Unknown ones are refused.", {"temperature": 0}
    )
    think: bool | str | None = optional(
        "Switches the reasoning of the chat template, or its effort: low, medium, high.", True
    )
    keep_alive: Any = optional("How long the model stays loaded. Not used: it always does.", "5m")


class OllamaMessage(Body):
    role: str = required("system, user, assistant or tool.", "user")
    content: str | None = optional("Text of the message.", "Why is the sky blue?")
    thinking: str | None = optional("Reasoning of an assistant's message.", "The user asks about light.")
    images: list[str] | None = optional("Images in base64, or as URLs.", ["iVBORw0KGgo="])
    tool_calls: list[dict[str, Any]] | None = optional(
        "Calls of an assistant's message.", [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]
    )
    tool_name: str | None = optional("Name of the tool whose result this is.", "get_weather")
    tool_call_id: str | None = optional("Id of the call whose result this is.", "call_1")


class OllamaChatBody(OllamaFields):
    messages: list[OllamaMessage] | None = optional(
        "The conversation so far. Without one the answer says that the model is loaded.",
        [{"role": "user", "content": "Why is the sky blue?"}],
    )
    tools: list[Tool] | None = optional(
        "Functions that the model may call.",
        [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
    )


class OllamaGenerateBody(OllamaFields):
    prompt: str | None = optional(
        "What the user says. Without one the answer says that the model is loaded.", "Why is the sky blue?"
    )
    images: list[str] | None = optional("Images in base64, or as URLs.", [])
    system: str | None = optional("The system message.", "You answer in one sentence.")
    raw: bool | None = optional("True: the prompt goes to the model without a chat template. Default false.", False)


class ShowBody(Body):
    model: str | None = optional("Name of the model or of a LoRA adapter; it may end in :latest.", "smollm2:latest")
    name: str | None = optional("Older clients' name of model.", "smollm2:latest")
    verbose: bool | None = optional("True: the answer lists more. Not used.", False)


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
            raise unsupported(f"options.{name}", message)
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
    check_choice(f"{field}.role", message.role, ROLES)
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
