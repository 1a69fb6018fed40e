"""Bodies of /api/chat, /api/generate and /api/show. Pure.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from typing import Any

import msgspec

from engine.frontend.apis.chat.body import READER
from engine.frontend.apis.chat.tools import Tool
from engine.frontend.apis.shared.body_reader import BodyReader, Inside, Unserved
from engine.frontend.apis.shared.other_apis import OwnFields, missing_in


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling options first, then unsupported ones, rejected unless off; the rest is ignored."""

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


class OllamaFields(OwnFields, kw_only=True):
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
