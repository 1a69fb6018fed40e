"""Bodies of /v1/messages and /v1/messages/count_tokens. Pure.

Source: https://docs.anthropic.com/en/api/messages
"""

from typing import Any

import msgspec

from engine.frontend.apis.chat.body import READER as CHAT
from engine.frontend.apis.shared.body_reader import BodyReader, Unserved, missing_in
from engine.frontend.apis.shared.fields import Mixed, OwnFields


class ImageSource(msgspec.Struct, kw_only=True):
    """`type`: "base64" (with `data`) or "url"; `file_id` is unsupported."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """A part of a message; `translate.py` has the fields by type. The last ones are ignored."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    source: ImageSource | None = None
    content: "str | list[Block] | None" = None
    cache_control: Any = None
    caller: Any = None
    citations: Any = None
    data: Any = None
    is_error: Any = None
    signature: Any = None
    toolset_name: Any = None


class PlacedImage(Block, kw_only=True):
    """An image with a URL or base64, at `field` of the body."""

    url: str
    is_base64: bool
    field: str


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool. `type` None or "custom": a client's function. The last two fields are ignored."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(msgspec.Struct, OwnFields, metaclass=Mixed, kw_only=True):
    """Prompt fields. The last ones concern Anthropic's own service and are ignored."""

    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class CountTokensBody(PromptFields, kw_only=True):
    pass


class MessagesBody(PromptFields, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


_REFUSED = {
    **missing_in(MessagesBody, CHAT, "ask /v1/chat/completions, which has it"),
    "container": Unserved("leave it out; this server runs no tools"),
    "mcp_servers": Unserved("call them yourself, as tools"),
}
_LOOKED_INTO = ("messages", "system", "tools", "tool_choice", "thinking", "output_config")
MESSAGES = BodyReader(body=MessagesBody, refused=_REFUSED, looked_into=_LOOKED_INTO)
COUNT_TOKENS = BodyReader(body=CountTokensBody, refused=_REFUSED, looked_into=_LOOKED_INTO)
