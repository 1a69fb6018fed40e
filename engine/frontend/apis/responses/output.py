"""Output items of an answer, and their events. Pure.

output_item.added, content_part.added, *_text.delta..., *_text.done, content_part.done,
  output_item.done                                      text, reasoning
output_item.added, function_call_arguments.delta..., function_call_arguments.done,
  output_item.done                                      a call
"""

from typing import Any

from engine.frontend.apis.chat.calls import MintId
from engine.text.parts import Arguments, CallBegins, Part, PlainText, ReasoningText
from service.responses.items import item_id

Event = dict[str, Any]


class OutputItems:
    """Output items so far (`items`). `mint_id`: the `call_id` of calls without id."""

    def __init__(self, response_id: str, *, mint_id: MintId) -> None:
        self.items: list[dict[str, Any]] = []
        self._response_id = response_id
        self._mint_id = mint_id
        self._open: str | None = None  # type of the growing last item

    def add(self, part: Part, logprobs: list[dict[str, Any]]) -> list[Event]:
        """`logprobs`: of a `PlainText`'s tokens."""
        match part:
            case ReasoningText(text):
                return [*self._begin_unless("reasoning"), *self._grow(text, [])]
            case PlainText(text):
                return [*self._begin_unless("message"), *self._grow(text, logprobs)]
            case CallBegins(call, name, id):
                id = id or self._mint_id(name, call)
                return self._begin("function_call", call_id=id, name=name, arguments="")
            case Arguments(_, text):
                self.items[-1]["arguments"] += text
                return [self._event("response.function_call_arguments.delta", delta=text)]

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add logprobs of final tokens without text; not after calls or reasoning."""
        if self.items and self._open != "message":
            return []
        return [*self._begin_unless("message"), *self._grow("", logprobs)]

    def end(self, *, complete: bool) -> list[Event]:
        """End the last item; an empty answer is an empty message."""
        begun = [] if self.items else self._begin("message")
        return begun + self._close("completed" if complete else "incomplete")

    def _begin_unless(self, type: str) -> list[Event]:
        return [] if self._open == type else self._begin(type)

    def _begin(self, type: str, **fields: Any) -> list[Event]:
        events = self._close("completed")
        if type == "message":
            fields = {"role": "assistant", "content": []}
        elif type == "reasoning":
            fields = {"summary": [], "content": [], "encrypted_content": None}
        id = item_id(type, self._response_id, len(self.items))
        item = {"id": id, "type": type, "status": "in_progress", **fields}
        self.items.append(item)
        self._open = type
        events.append(self._item_event("added"))
        if type == "function_call":
            return events
        item["content"] = [_part(type)]
        return [*events, self._event("response.content_part.added", content_index=0, part=_part(type))]

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        if self._open == "reasoning":
            return [self._event("response.reasoning_text.delta", content_index=0, delta=text)]
        part["logprobs"] += logprobs
        return [self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _close(self, status: str) -> list[Event]:
        type, self._open = self._open, None
        if type is None:
            return []
        item = self.items[-1]
        item["status"] = status
        if type == "function_call":
            done = self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            return [done, self._item_event("done")]
        part = item["content"][0]
        kind, more = ("reasoning_text", {}) if type == "reasoning" else ("output_text", {"logprobs": part["logprobs"]})
        return [
            self._event(f"response.{kind}.done", content_index=0, text=part["text"], **more),
            self._event("response.content_part.done", content_index=0, part=dict(part)),
            self._item_event("done"),
        ]

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, what: str) -> Event:
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }


def _part(type: str) -> dict[str, Any]:
    if type == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
