"""Body of /v1/responses, and checks of its own fields. Pure.

https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Any

import msgspec

from engine.frontend.apis.chat.body import MAX_TOP_LOGPROBS
from engine.frontend.apis.shared.body_reader import CHAT, BodyReader, Unserved
from engine.frontend.apis.shared.fields import RequestFields, check_range
from service.http.errors import bad_field

LOGPROBS = "message.output_text.logprobs"
# `include` values for built-in tools, images and encrypted reasoning, always empty here.
_EMPTY_INCLUDES = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    "reasoning.encrypted_content",
)
FORMATS = ("text", "json_object", "json_schema")
TRUNCATIONS = ("auto", "disabled")
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")
MODES = ("auto", "required")
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
# Chat fields and their replacement here.
MOVED = {
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "rid": "the answer's id is the request's",
    "return_token_ids": "ask /v1/chat/completions",
    "return_hidden_states": "ask /v1/chat/completions",
}
_REFUSED = {
    **CHAT,
    "background": Unserved("leave it out; the answer comes while the client waits"),
    "conversation": Unserved("use previous_response_id, or send all items"),
    "context_management": Unserved("shorten the input, or set truncation to auto"),
    "moderation": Unserved("leave it out"),
    "prompt": Unserved("write the prompt's text into instructions and input"),
}


class Part(msgspec.Struct, kw_only=True):
    """A part of a message, tool output, or reasoning. The last fields are ignored."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None
    annotations: Any = None
    logprobs: Any = None


class Item(msgspec.Struct, kw_only=True):
    """An item; `type` decides which fields count, default a message. The last ones are ignored."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: Any = None
    phase: Any = None
    status: Any = None


class ResponseTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """A function by `name`, or (allowed_tools) `mode` and the allowed `tools`."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ResponseTool] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseBody(RequestFields, kw_only=True):
    """Body of /v1/responses. `history`: earlier items, from a router that stores conversations."""

    input: str | list[Item]
    history: list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


READER = BodyReader(
    body=ResponseBody,
    refused=_REFUSED,
    looked_into=("input", "tools", "tool_choice", "stream_options", "text", "reasoning"),
)


def check_response(body: ResponseBody) -> None:
    """Raises ApiError(400)."""
    for name, remedy in MOVED.items():
        if getattr(body, name) is not None:
            raise bad_field(name, f"is no field of this API; {remedy}", code="unsupported_parameter")
    if body.n not in (None, 1):
        raise bad_field("n", "a response is one answer; leave it out", code="unsupported_parameter")
    _one_of("truncation", body.truncation, TRUNCATIONS)
    check_range("top_logprobs", body.top_logprobs, MAX_TOP_LOGPROBS)
    for index, name in enumerate(body.include or ()):
        _one_of(f"include[{index}]", name, (LOGPROBS, *_EMPTY_INCLUDES))
    _check_text(body.text or TextConfig())
    reasoning = body.reasoning or Reasoning()
    _one_of("reasoning.summary", reasoning.summary, SUMMARIES)
    _one_of("reasoning.generate_summary", reasoning.generate_summary, SUMMARIES)
    _check_metadata(body.metadata or {})
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise bad_field("max_output_tokens", f"must be at least 1, got {body.max_output_tokens}")


def _check_text(text: TextConfig) -> None:
    _one_of("text.verbosity", text.verbosity, VERBOSITIES)
    if text.format is None:
        return
    _one_of("text.format.type", text.format.type, FORMATS)
    if text.format.type == "json_schema" and text.format.schema is None:
        raise bad_field("text.format.schema", "is missing")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad_field("metadata", f"at most {MAX_METADATA} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise bad_field(
                "metadata", f"keys have at most {MAX_KEY_CHARS} characters and values {MAX_VALUE_CHARS}: {key[:80]!r}"
            )


def _one_of(field: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise bad_field(field, f"{value[:100]!r} is not one of {', '.join(known)}")
