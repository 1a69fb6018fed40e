"""A chat as a body: OpenAI's fields, those of SGLang and vLLM, and their checks. Pure.

The routes of other APIs write theirs into a ChatBody, so that a feature of chats is one.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.frontend.apis.chat.tools import Tool, ToolChoice, check_tools
from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.apis.shared.refused import CHAT, NO_AUDIO
from engine.frontend.apis.shared.request import RequestFields, check_range, check_request
from engine.frontend.images.source import MediaSource
from engine.text.custom_calls import INPUT
from service.http.errors import bad_field

MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MEDIA = ("image_url", "video_url")
PARTS = ("text", *MEDIA)
AUDIO = ("input_audio", "audio_url", "audio")
NO_PLACES: Mapping[str, Any] = {}


class MediaUrl(msgspec.Struct, kw_only=True):
    """`fps`: frames a second of a video. `detail` says how much a client wants to pay, and is ignored: an image is seen as it is."""

    url: str
    detail: str | None = None
    fps: float | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None

    def field_at(self, message: int, index: int) -> str:
        """The path of what it is made of, by its place in the body."""
        return f"messages[{message}].content[{index}].{self.type}"


class PlacedPart(ContentPart, kw_only=True):
    """A part that another API's body has at `field`, base64 if `is_base64`."""

    field: str
    is_base64: bool = False

    def field_at(self, message: int, index: int) -> str:
        return self.field


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


def template_messages(messages: list[ChatMessage], places: Mapping[str, Any] = NO_PLACES) -> list[dict[str, Any]]:
    """Plain dicts for chat templates: text parts joined, `developer` as `system`, which more templates know.

    `places`: what the template gets for a part of each type in `MEDIA`, in a list of parts, or in the text if it is one.
    """
    return [_template_message(m, places) for m in messages]


def sources_of(messages: list[ChatMessage]) -> list[MediaSource]:
    """The images and videos of a chat, in their order; checked."""
    return [
        _source(part, part.field_at(i, j))
        for i, m in enumerate(messages)
        if isinstance(m.content, list)
        for j, part in enumerate(m.content)
        if part.type in MEDIA
    ]


def _source(part: ContentPart, field: str) -> MediaSource:
    given = getattr(part, part.type)
    url = given if isinstance(given, MediaUrl) else MediaUrl(url=given)
    return MediaSource(
        field=field,
        url=url.url,
        fps=url.fps,
        is_video=part.type == "video_url",
        is_base64=isinstance(part, PlacedPart) and part.is_base64,
    )


def _template_message(m: ChatMessage, places: Mapping[str, Any]) -> dict[str, Any]:
    content = m.content if isinstance(m.content, str) else _template_content(m.content or [], places)
    extra = {
        k: v for k in ("name", "reasoning_content", "tool_call_id", "tool_calls") if (v := getattr(m, k)) is not None
    }
    if m.tool_calls is not None:
        extra["tool_calls"] = [_template_call(call) for call in m.tool_calls]
    return {"role": "system" if m.role == "developer" else m.role, "content": content, **extra}


def _template_content(parts: list[ContentPart], places: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    if all(part.type == "text" for part in parts):
        return "\n".join(part.text or "" for part in parts)
    shown = [places[part.type] if part.type in MEDIA else part.text or "" for part in parts]
    if all(isinstance(one, str) for one in shown):
        return "\n".join(shown)
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in shown]


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
            if part.type in AUDIO:
                raise bad_field(f"messages[{i}].content[{j}].{part.type}", NO_AUDIO, code="unsupported_parameter")
            if part.type not in PARTS or getattr(part, part.type) is None:
                raise bad_field(
                    f"messages[{i}].content[{j}]",
                    f"must be a part of type {', '.join(PARTS)} with a field of that name, got {part.type[:100]!r}",
                )
