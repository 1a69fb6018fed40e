"""A chat as a body: OpenAI's fields, those of SGLang and vLLM, and their checks. Pure.

The routes of other APIs write theirs into a ChatBody, so that a feature of chats is one.
"""

from typing import Any

import msgspec

from engine.frontend.apis.chat.tools import Tool, ToolChoice, check_tools
from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.apis.shared.refused import CHAT
from engine.frontend.apis.shared.request import RequestFields, check_range, check_request
from engine.text.custom_calls import INPUT
from service.http.errors import bad_field

MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(RequestFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    function_call: Any = None
    modalities: list[str] | None = None


READER = BodyReader(
    body=ChatBody, refused=CHAT, looked_into=("tools", "tool_choice", "stream_options", "response_format")
)


def check_chat(body: ChatBody) -> None:
    check_request(body)
    if body.function_call not in (None, "none", "auto"):
        raise bad_field("function_call", "is not supported; use tools and tool_choice", code="unsupported_parameter")
    check_tools(body.tools, body.tool_choice)
    if body.modalities not in (None, [], ["text"]):
        raise bad_field("modalities", "only text is supported", code="unsupported_parameter")
    check_range("top_logprobs", body.top_logprobs, MAX_TOP_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    _check_messages(body.messages)


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Plain dicts for chat templates: text parts joined, `developer` as `system`, which more templates know."""
    return [_template_message(m) for m in messages]


def _template_message(m: ChatMessage) -> dict[str, Any]:
    content = m.content if isinstance(m.content, str) else "\n".join(p.text or "" for p in m.content or [])
    extra = {
        k: v for k in ("name", "reasoning_content", "tool_call_id", "tool_calls") if (v := getattr(m, k)) is not None
    }
    if m.tool_calls is not None:
        extra["tool_calls"] = [_template_call(call) for call in m.tool_calls]
    return {"role": "system" if m.role == "developer" else m.role, "content": content, **extra}


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates write the arguments themselves: they want the object, clients send its JSON text. A custom call is a function's."""
    custom = call.get("custom")
    if isinstance(custom, dict):
        seen = {"name": custom.get("name"), "arguments": {INPUT: custom.get("input")}}
        return {"id": call.get("id"), "type": "function", "function": seen}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise bad_field("messages", "must not be empty")
    for i, m in enumerate(messages):
        if m.role not in ROLES:
            raise bad_field(f"messages[{i}].role", f"{m.role!r} is not one of {', '.join(ROLES)}")
        if m.content is None and not m.tool_calls:
            raise bad_field(f"messages[{i}].content", "is missing")
        for j, part in enumerate(m.content if isinstance(m.content, list) else []):
            if part.type != "text" or part.text is None:
                raise bad_field(
                    f"messages[{i}].content[{j}]", f"must be a part of type text with a text, got {part.type!r}"
                )
