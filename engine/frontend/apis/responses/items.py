"""Conversation items as chat messages. Pure.

An assistant's items (reasoning, text, calls) become one message.
"""

from collections.abc import Iterable
from typing import Any

from engine.frontend.apis.chat.body import ChatMessage, ContentPart, PlacedPart
from engine.frontend.apis.responses.body import Item, Part
from service.http.errors import ApiError, bad_field

ROLES = ("user", "assistant", "system", "developer")
IMAGE = "input_image"
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def messages_of(items: Iterable[Item], *, field: str) -> list[ChatMessage]:
    """`field`: of the items, for errors. Raises ApiError(400)."""
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
            raise bad_field(
                f"{field}.type",
                f"{item.type[:100]!r} is not supported; use message, function_call, function_call_output or reasoning",
                code="unsupported_parameter",
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
        raise bad_field(field, "is missing")
    if isinstance(content, str):
        return content
    return [_part(part, f"{field}[{i}]") for i, part in enumerate(content)]


def _parts(content: str | list[ContentPart]) -> list[ContentPart]:
    return content if isinstance(content, list) else [ContentPart(type="text", text=content)]


def _part(part: Part, field: str) -> ContentPart:
    if part.type != IMAGE:
        return ContentPart(type="text", text=_text(part, field))
    if part.file_id is not None:
        raise bad_field(f"{field}.file_id", "no files are stored here; send image_url", code="unsupported_parameter")
    url = _text_of(part.image_url, f"{field}.image_url")
    return PlacedPart(type="image_url", image_url=url, field=f"{field}.image_url")


def _text(part: Part, field: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*TEXTS, "refusal"):
        raise _unknown_part(field, part.type)
    return _text_of(text, f"{field}.{'refusal' if part.type == 'refusal' else 'text'}")


def _unknown_part(field: str, type: str) -> ApiError:
    return bad_field(
        f"{field}.type",
        f"{type[:100]!r} is not supported: parts are texts (input_text, output_text) and images ({IMAGE})",
        code="unsupported_parameter",
    )


def _text_of(value: str | None, field: str) -> str:
    if value is None:
        raise bad_field(field, "is missing")
    return value
