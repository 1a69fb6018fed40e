"""OpenAI's `tool_calls` in a chat's answer, whole or as deltas. Pure."""

from collections.abc import Callable
from typing import Any

import msgspec

from engine.frontend.apis.openai.view import ChatView, delta_of
from engine.text.sample import TextOutput
from engine.text.tool_calls import Arguments, CallBegins, Part, PlainText, ToolCalls


class ToolChatView(ChatView):
    """`reader`: a new reader of calls, one for each sample. `mint_id`: the id of a call."""

    def __init__(self, *args: Any, reader: Callable[[], ToolCalls], mint_id: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader = reader
        self._mint_id = mint_id
        self._readers: dict[int, ToolCalls] = {}

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        choice = super()._choice(index, output)
        reader = self._reader()
        parts = reader.feed(output.text) + reader.end()
        if reader.num_calls:
            text = "".join(part.text for part in parts if isinstance(part, PlainText))
            choice["message"] |= {"content": text or None, "tool_calls": self._whole_calls(parts)}
        return _with_reason(choice, reader)

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        reader = self._readers.setdefault(index, self._reader())
        parts = reader.feed(output.text)
        if output.tokens.finish is not None:
            parts += reader.end()
        plain = "".join(part.text for part in parts if isinstance(part, PlainText))
        deltas = super()._deltas(index, msgspec.structs.replace(output, text=plain))
        calls = [delta_of(index, {"tool_calls": [self._delta(p)]}) for p in parts if not isinstance(p, PlainText)]
        if output.tokens.finish is None:
            return deltas + calls
        return [*deltas[:-1], *calls, _with_reason(deltas[-1], reader)]

    def _delta(self, part: CallBegins | Arguments) -> dict[str, Any]:
        if isinstance(part, Arguments):
            return {"index": part.index, "function": {"arguments": part.text}}
        return {"index": part.index, **self._call(part.name)}

    def _whole_calls(self, parts: list[Part]) -> list[dict[str, Any]]:
        calls = [self._call(part.name) for part in parts if isinstance(part, CallBegins)]
        for part in parts:
            if isinstance(part, Arguments):
                calls[part.index]["function"]["arguments"] += part.text
        return calls

    def _call(self, name: str) -> dict[str, Any]:
        return {"id": self._mint_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def _with_reason(choice: dict[str, Any], reader: ToolCalls) -> dict[str, Any]:
    if reader.num_calls and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"
    return choice
