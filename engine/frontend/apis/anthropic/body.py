"""Bodies of /v1/messages and /v1/messages/count_tokens. Pure.

Source: https://docs.anthropic.com/en/api/messages
"""

from typing import Any

from engine.frontend.apis.chat.body import READER as CHAT
from engine.frontend.apis.shared.body_reader import BodyReader, Unserved, missing_in
from engine.frontend.apis.shared.request_body import OwnFields
from service.http.body import Body, optional, required

_EPHEMERAL = {"type": "ephemeral"}


class CacheControl(Body):
    """Prefixes are cached anyway."""

    type: str = required("Only ephemeral.", "ephemeral")
    ttl: str | None = optional("Time within which the next turn comes: 5m (the default) or 1h.", "1h")


class Metadata(Body):
    user_id: str | None = optional("Name of the conversation, where session_id is absent.", "user-1")


def _cached() -> Any:
    return optional("What Anthropic's service caches. Here only its time counts.", _EPHEMERAL)


class ImageSource(Body):
    type: str = required("base64 (with data), or url.", "url")
    media_type: str | None = optional("Type of the image in data, as the file itself says.", "image/png")
    data: str | None = optional("The image in base64, for type base64.", "iVBORw0KGgo=")
    url: str | None = optional("Address of the image, for type url.", "https://example.com/cat.png")
    file_id: str | None = optional("A file of Anthropic's service. Not supported.", "file_1")


class Block(Body):
    """A part of a message."""

    type: str = required(
        "text, image, tool_result (of a user), thinking, redacted_thinking or tool_use (of an assistant).", "text"
    )
    text: str | None = optional("Text, for type text.", "What is the capital of France?")
    thinking: str | None = optional("Reasoning, for type thinking.", "The user asks for a city.")
    id: str | None = optional("Id of the call, for type tool_use.", "toolu_1")
    name: str | None = optional("Name of the tool, for type tool_use.", "get_weather")
    input: dict[str, Any] | None = optional("Arguments of the call, for type tool_use.", {"city": "Paris"})
    tool_use_id: str | None = optional("Id of the call that this answers, for type tool_result.", "toolu_1")
    source: ImageSource | None = optional(
        "The image, for type image.", {"type": "url", "url": "https://example.com/cat.png"}
    )
    content: "str | list[Block] | None" = optional("The result, for type tool_result: text, or blocks.", "12 degrees")
    cache_control: CacheControl | None = _cached()
    caller: Any = optional("What made the call on Anthropic's servers. Not used.", {"type": "direct"})
    citations: Any = optional("Citations of a text. Not used.", [])
    data: Any = optional("Encrypted reasoning, for type redacted_thinking. Not used.", "EmwKAhgB")
    is_error: Any = optional("Whether the tool failed. Not used: say it in content.", False)
    signature: Any = optional("Signature of the reasoning. Not used.", "")
    toolset_name: Any = optional("Group of the tool on Anthropic's servers. Not used.", "search")


class PlacedImage(Block):
    """An image with a URL or base64, at `field` of the body."""

    url: str
    is_base64: bool
    field: str


class Message(Body):
    role: str = required("user, assistant or system.", "user")
    content: str | list[Block] = required("Text, or blocks.", "What is the capital of France?")


class ToolDefinition(Body):
    name: str = required("1 to 64 letters, digits, dots, dashes or underscores.", "get_weather")
    type: str | None = optional("Only custom, the default: this server runs no tools of its own.", "custom")
    description: str | None = optional("What the tool does, for the model.", "Weather of a city")
    input_schema: dict[str, Any] | None = optional(
        "JSON schema of the arguments. Required.", {"type": "object", "properties": {"city": {"type": "string"}}}
    )
    strict: bool | None = optional("True: calls match the schema. Default false.", True)
    defer_loading: bool | None = optional("Not supported: only false.", False)
    cache_control: CacheControl | None = _cached()
    eager_input_streaming: Any = optional("Whether arguments stream as they come. Not used: they do.", True)


class MessageToolChoice(Body):
    type: str = required("auto, any (at least one call), none, or tool.", "auto")
    name: str | None = optional("Name of the tool to call, for type tool.", "get_weather")
    disable_parallel_tool_use: bool | None = optional("True: at most one call. Default false.", True)


class Thinking(Body):
    type: str = required("enabled or adaptive (the chat template's reasoning is on), or disabled.", "enabled")
    budget_tokens: int | None = optional(
        "Tokens of reasoning after which its end is forced, at least 0. Needs --reasoning-parser.", 1024
    )
    display: str | None = optional("omitted: the answer leaves reasoning out. Default: it has blocks of it.", "omitted")


class OutputFormat(Body):
    type: str = required("Only json_schema.", "json_schema")
    schema_: dict[str, Any] | None = optional(
        "JSON schema that the answer follows. Required.", {"type": "object"}, alias="schema"
    )


class OutputConfig(Body):
    effort: str | None = optional("Goes to the chat template: low, medium, high, or what the template knows.", "low")
    format: OutputFormat | None = optional(
        "Format of the answer.", {"type": "json_schema", "schema": {"type": "object"}}
    )


class PromptFields(OwnFields):
    """Prompt fields. The last ones concern Anthropic's own service and are ignored."""

    messages: list[Message] = required(
        "The conversation so far. The answer continues a last message of the assistant.",
        [{"role": "user", "content": "What is the capital of France?"}],
    )
    model: str | None = optional(
        "Name of the model or of a LoRA adapter. Default: the model that is served.", "smollm2"
    )
    system: str | list[Block] | None = optional("The system message, text or blocks.", "You answer in one sentence.")
    tools: list[ToolDefinition] | None = optional(
        "Tools that the model may call.", [{"name": "get_weather", "input_schema": {"type": "object"}}]
    )
    tool_choice: MessageToolChoice | None = optional("Whether and what the model calls.", {"type": "auto"})
    thinking: Thinking | None = optional(
        "Whether the model reasons. Default: the chat template decides.", {"type": "enabled", "budget_tokens": 1024}
    )
    output_config: OutputConfig | None = optional(
        "Effort of the reasoning, and format of the answer.", {"effort": "low"}
    )
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Variables for the chat template (SGLang, vLLM).", {"enable_thinking": False}
    )
    cache_control: CacheControl | None = _cached()
    context_management: Any = optional("How Anthropic's service shortens a conversation. Not used.", {"edits": []})
    diagnostics: Any = optional("Diagnostics of Anthropic's service. Not used.", {})
    inference_geo: Any = optional("Where Anthropic's service computes. Not used.", "eu")
    metadata: Metadata | None = optional("Data about the request.", {"user_id": "user-1"})
    service_tier: Any = optional("Capacity of Anthropic's service. Not used.", "auto")
    speed: Any = optional("Speed of Anthropic's service. Not used.", "standard")
    user_profile_id: Any = optional("A profile of Anthropic's service. Not used.", "profile_1")
    workspace_id: Any = optional("A workspace of Anthropic's service. Not used.", "workspace_1")


class CountTokensBody(PromptFields):
    pass


class MessagesBody(PromptFields):
    max_tokens: int = required("Most tokens of the answer. What goes beyond the context is cut.", 1024)
    stop_sequences: list[str] | None = optional(
        "Texts that end the answer, up to 32, of up to 1024 characters each. The answer leaves them out.", ["END"]
    )
    stream: bool | None = optional("True: the answer comes as server-sent events. Default false.", True)
    temperature: float | None = optional(
        "Randomness, at least 0: 0 always takes the likeliest token. Default: the checkpoint's, or 1.", 0.7
    )
    top_k: int | None = optional("Samples from this many of the likeliest tokens. 0: from all.", 40)
    top_p: float | None = optional(
        "Samples from the likeliest tokens whose probabilities add up to this. Above 0, up to 1.", 0.9
    )


_REFUSED = {
    **missing_in(MessagesBody, CHAT, "ask /v1/chat/completions, which has it"),
    "container": Unserved("leave it out; this server runs no tools"),
    "mcp_servers": Unserved("call them yourself, as tools"),
}
_LOOKED_INTO = ("messages", "system", "tools", "tool_choice", "thinking", "output_config")
MESSAGES = BodyReader(body=MessagesBody, refused=_REFUSED, looked_into=_LOOKED_INTO)
COUNT_TOKENS = BodyReader(body=CountTokensBody, refused=_REFUSED, looked_into=_LOOKED_INTO)
