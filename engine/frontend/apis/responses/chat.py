"""A response's body as a chat's, cut to the context."""

from collections.abc import Iterable
from typing import Any

from engine.frontend.apis.chat.body import ChatBody, ChatMessage, ContentPart, PlacedPart
from engine.frontend.apis.chat.plan import ChatPlan, plan_chat
from engine.frontend.apis.chat.tools import ChosenFunction, Tool, ToolChoice, ToolFunction
from engine.frontend.apis.responses.body import (
    MODES,
    Item,
    Part,
    ResponseBody,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
    check_response,
)
from engine.frontend.apis.shared.constraints import ResponseFormat
from engine.frontend.apis.shared.fields import CONTEXT_EXCEEDED
from engine.frontend.apis.shared.request_body import ChatFields
from engine.frontend.images.placeholders import LoadedMedia, MediaSource
from engine.frontend.services import Services
from service.http.errors import ApiError, bad_field, missing, unsupported

# ---- items as chat messages

ROLES = ("user", "assistant", "system", "developer")
IMAGE = "input_image"
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def messages_of(items: Iterable[Item], *, field: str) -> list[ChatMessage]:
    """An assistant's items (reasoning, text, calls) become one message.

    `field`: of the items, for errors. Raises ApiError(400).
    """
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        _add(messages, item, f"{field}[{index}]")
    return messages


def check_calls(messages: list[ChatMessage]) -> None:
    """Raises ApiError(400) for a tool output without an earlier call."""
    known: set[Any] = set()
    for message in messages:
        known.update(call["id"] for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in known:
            text = f"a function_call_output has the call_id {str(message.tool_call_id)[:100]!r}, and no function_call before it"
            raise bad_field("input", f"{text} has; send the call, or previous_response_id")


def _add(messages: list[ChatMessage], item: Item, field: str) -> None:
    match item.type:
        case None | "message":
            _add_message(messages, item, field)
        case "function_call":
            call = {
                "name": _text_of(item.name, f"{field}.name"),
                "arguments": _text_of(item.arguments, f"{field}.arguments"),
            }
            entry = {"id": _text_of(item.call_id, f"{field}.call_id"), "type": "function", "function": call}
            turn = _turn(messages)
            turn.tool_calls = turn.tool_calls or []
            turn.tool_calls.append(entry)
        case "function_call_output":
            content = _content(item.output, f"{field}.output")
            call_id = _text_of(item.call_id, f"{field}.call_id")
            messages.append(ChatMessage(role="tool", content=content, tool_call_id=call_id))
        case "reasoning":
            _add_reasoning(messages, item, field)
        case "item_reference":
            raise bad_field(field, "a reference needs stored responses (--max-stored-responses); send the item itself")
        case _:
            raise unsupported(
                f"{field}.type",
                f"{item.type[:100]!r} is not supported; use message, function_call, function_call_output or reasoning",
            )


def _add_message(messages: list[ChatMessage], item: Item, field: str) -> None:
    if item.role not in ROLES:
        raise bad_field(f"{field}.role", f"{item.role!r} is not one of {', '.join(ROLES)}")
    content = _content(item.content, f"{field}.content")
    if item.role == "assistant":
        turn = _begun_turn(messages)
        if turn.content is None:
            turn.content = content
        else:
            turn.content = _parts(turn.content)
            turn.content += _parts(content)
    else:
        messages.append(ChatMessage(role=item.role, content=content))


def _add_reasoning(messages: list[ChatMessage], item: Item, field: str) -> None:
    """Text, else summary; encrypted reasoning is ignored."""
    parts = item.content or item.summary or []
    text = parts if isinstance(parts, str) else "".join(p.text or "" for p in parts)
    if text:
        turn = _begun_turn(messages)
        turn.reasoning_content = (turn.reasoning_content or "") + text


def _begun_turn(messages: list[ChatMessage]) -> ChatMessage:
    """The assistant message to extend: without text, or with calls that have no results."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or (last.content is not None and not last.tool_calls):
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _turn(messages: list[ChatMessage]) -> ChatMessage:
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _content(content: str | list[Part] | None, field: str) -> str | list[ContentPart]:
    if content is None:
        raise missing(field)
    if isinstance(content, str):
        return content
    return [_part(part, f"{field}[{i}]") for i, part in enumerate(content)]


def _parts(content: str | list[ContentPart]) -> list[ContentPart]:
    return content if isinstance(content, list) else [ContentPart(type="text", text=content)]


def _part(part: Part, field: str) -> ContentPart:
    if part.type != IMAGE:
        return ContentPart(type="text", text=_text(part, field))
    if part.file_id is not None:
        raise unsupported(f"{field}.file_id", "no files are stored here; send image_url")
    url = _text_of(part.image_url, f"{field}.image_url")
    return PlacedPart(type="image_url", image_url=url, field=f"{field}.image_url")


def _text(part: Part, field: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*TEXTS, "refusal"):
        raise unsupported(
            f"{field}.type",
            f"{part.type[:100]!r} is not supported: parts are texts (input_text, output_text) and images ({IMAGE})",
        )
    return _text_of(text, f"{field}.{'refusal' if part.type == 'refusal' else 'text'}")


def _text_of(value: str | None, field: str) -> str:
    if value is None:
        raise missing(field)
    return value


# ---- chat

_NOT_SHARED = frozenset(("response_format", "stream_options", "max_tokens", "rid", "n"))
_SHARED = tuple(name for name in ChatFields.model_fields if name not in _NOT_SHARED)
# Names in a chat's errors -> names here.
NAMES = {
    ".function.": ".",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def to_chat(body: ResponseBody) -> ChatBody:
    """Raises ApiError(400) that names the body's own field."""
    check_response(body)
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    choice = _choice(body.tool_choice)
    if isinstance(body.tool_choice, ResponseToolChoice) and body.tool_choice.type == "allowed_tools":
        tools, choice = _allowed(body.tool_choice, tools)
    named = body.session_id or body.prompt_cache_key or body.first_response_id
    return ChatBody(
        **{**{name: getattr(body, name) for name in _SHARED}, "session_id": named},
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        tools=tools or None,
        tool_choice=choice,
        response_format=_format(body.text.format if body.text else None),
    )


def _messages(body: ResponseBody) -> list[ChatMessage]:
    own = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    instructions = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    messages = messages_of(body.history or (), field="history") + messages_of(own, field="input")
    if not messages:
        raise bad_field("input", "must not be empty")
    check_calls(messages)
    return instructions + messages


def _tool(tool: ResponseTool, field: str) -> Tool:
    if tool.type != "function":
        message = f"{tool.type[:100]!r} is not supported: this server runs no tools of its own; use function"
        raise unsupported(f"{field}.type", message)
    if tool.name is None:
        raise missing(f"{field}.name")
    function = ToolFunction(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(function=function)


def _choice(choice: str | ResponseToolChoice | None) -> str | ToolChoice | None:
    if choice is None or isinstance(choice, str) or choice.type == "allowed_tools":
        return choice if isinstance(choice, str) else None
    if choice.type != "function":
        message = f"{choice.type[:100]!r} is not supported; use function or allowed_tools"
        raise unsupported("tool_choice.type", message)
    if choice.name is None:
        raise missing("tool_choice.name")
    return ToolChoice(function=ChosenFunction(name=choice.name))


def _allowed(choice: ResponseToolChoice, tools: list[Tool]) -> tuple[list[Tool], str]:
    if choice.mode not in MODES:
        raise bad_field("tool_choice.mode", f"{choice.mode!r} is not one of {', '.join(MODES)}")
    named = [_tool(tool, f"tool_choice.tools[{i}]").function.name for i, tool in enumerate(choice.tools or [])]
    unknown = set(named) - {tool.function.name for tool in tools}
    if unknown or not named:
        raise bad_field("tool_choice.tools", f"{min(unknown)!r} is not among tools" if unknown else "must not be empty")
    return [tool for tool in tools if tool.function.name in named], choice.mode or "auto"


def _format(format: TextFormat | None) -> ResponseFormat | None:
    return None if format is None else ResponseFormat(type=format.type, json_schema=format)


async def truncated_chat(s: Services, chat: ChatBody) -> ChatPlan:
    """Plan `truncation: auto`: drop the fewest of the oldest turns, never all or instructions."""
    messages, known = chat.messages, dict[MediaSource, LoadedMedia]()
    room = s.context_length - (chat.max_completion_tokens or 1)
    head = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
    starts = [head, *(i for i, m in enumerate(messages) if i > head and m.role == "user")]

    async def plan(num_dropped: int) -> ChatPlan:
        chat.messages = messages[:head] + messages[starts[num_dropped] :]
        return await plan_chat(s, chat, known)

    async def fitting(num_dropped: int) -> ChatPlan | None:
        try:
            found = await plan(num_dropped)
        except ApiError as error:
            if error.code != CONTEXT_EXCEEDED:
                raise
            return None
        return found if len(found.input_ids) <= room else None

    if (whole := await fitting(0)) is not None:
        return whole
    low, high = 1, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fitting(middle) is None:
            low = middle + 1
        else:
            high = middle
    return await plan(high)
