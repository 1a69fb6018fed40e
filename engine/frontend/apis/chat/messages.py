"""Messages of a chat for its template. Pure."""

from collections.abc import Mapping
from typing import Any

from engine.frontend.apis.chat.body import MEDIA, ChatMessage, ContentPart, KeptMessage
from engine.text.continued import REASONING
from engine.text.custom_calls import INPUT
from engine.text.template_reads import TemplateReads
from engine.text.template_values import CallArguments, Parts, TextPart, joined

NO_PLACES: Mapping[str, Any] = {}
STRINGS = TemplateReads(
    parts=False,
    strings=True,
    null=False,
    calls_beside_null=False,
    one_call=False,
    short_ids=False,
    names=frozenset(),
)


def template_messages(
    messages: list[ChatMessage], *, reads: TemplateReads = STRINGS, places: Mapping[str, Any] = NO_PLACES
) -> list[dict[str, Any]]:
    """Plain dicts, contents as the template reads them, `developer` as `system`.

    `places`: per type in `MEDIA`, a part or a placeholder.
    """
    return [_template_message(m, reads, places) for m in messages]


def _template_message(m: ChatMessage, reads: TemplateReads, places: Mapping[str, Any]) -> dict[str, Any]:
    calls = _calls(m)
    message = {
        **(m.kept if isinstance(m, KeptMessage) else {}),
        "role": "system" if m.role == "developer" else m.role,
        "content": _content(m, reads, places, calls=bool(calls)),
        **{name: value for name in ("name", "tool_call_id") if (value := getattr(m, name)) is not None},
    }
    if calls:
        message["tool_calls"] = calls
    return message | _reasoning(m, message)


def _content(m: ChatMessage, reads: TemplateReads, places: Mapping[str, Any], *, calls: bool) -> str | Parts | None:
    """Null with calls stays null if the template tests for it; others would render "None"."""
    if m.content and isinstance(m.content, list):
        return _parts(m.content, reads, places)
    if m.content is None and not m.refusal and reads.null and calls:
        return None
    text = str(m.content or m.refusal or "")
    return text if reads.strings else Parts.of_text(text)


def _parts(parts: list[ContentPart], reads: TemplateReads, places: Mapping[str, Any]) -> str | Parts:
    shown = Parts(_part(part, places) for part in parts)
    keeps = reads.parts or not all(isinstance(part, TextPart) for part in shown)
    return shown if keeps else joined(shown)


def _part(part: ContentPart, places: Mapping[str, Any]) -> Any:
    shown = places[part.type] if part.type in MEDIA else getattr(part, part.type)
    return TextPart(shown) if isinstance(shown, str) else shown


def _reasoning(m: ChatMessage, message: dict[str, Any]) -> dict[str, str]:
    """Reasoning under all template names.

    gpt-oss rejects `thinking` with both content and calls.
    """
    text = m.reasoning_content or m.reasoning
    names = REASONING[:2] if message["content"] and message.get("tool_calls") else REASONING
    return dict.fromkeys(names, text) if text else {}


def _calls(m: ChatMessage) -> list[dict[str, Any]]:
    if m.function_call is not None:  # of OpenAI's first API for calls
        return [_call({"type": "function", "function": m.function_call})]
    return [_call(call) for call in m.tool_calls or ()]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    custom, function = call.get("custom"), call.get("function")
    if isinstance(custom, dict):
        function = {"name": custom.get("name"), "arguments": {INPUT: custom.get("input")}}
        call = {"id": call.get("id"), "type": "function"}
    if not isinstance(function, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": CallArguments.of(function.get("arguments"))}}
