"""Tool calls of a chat: ids by the model's style, and those of earlier messages. Pure."""

import hashlib
import re
import string
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from engine.frontend.apis.chat.body import RESULTS, ChatMessage
from engine.text.chat_template import ChatTemplate
from engine.text.parts import MintId
from engine.text.template_reads import MISTRAL_ID_CHARS, TemplateReads

_SHORT = re.compile(rf"[a-zA-Z0-9]{{{MISTRAL_ID_CHARS}}}", re.ASCII)
_LETTERS = string.digits + string.ascii_letters


def call_ids(
    parser: str | None, template: ChatTemplate | None, messages: list[ChatMessage], mint: Callable[[], str]
) -> MintId:
    """The maker of ids for parser and template. `mint`: makes unique ones."""
    if parser == "kimi_k2":
        num_before = sum(len(message.tool_calls or ()) for message in messages)
        return lambda name, index: f"functions.{name}:{num_before + index}"
    if parser == "mistral" or (template is not None and template.reads.short_ids):
        return lambda name, index: short_id(mint())
    return lambda name, index: mint()


def short_id(id: str) -> str:
    """`id` if of nine letters and digits, else such a hash of it."""
    if _SHORT.fullmatch(id):
        return id
    digest = hashlib.blake2b(id.encode(errors="replace"), digest_size=MISTRAL_ID_CHARS).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def as_taken(messages: list[dict[str, Any]], reads: TemplateReads) -> list[dict[str, Any]]:
    if reads.one_call or reads.names & {"id", "tool_call_id"}:
        _complete_ids(messages, short_id if reads.short_ids else str)
    if reads.calls_beside_null:
        messages = [one for message in messages for one in _calls_apart(message)]
    return _one_call_a_message(messages) if reads.one_call else messages


def _complete_ids(messages: list[dict[str, Any]], fit: Callable[[str], str]) -> None:
    """Complete missing call ids, in place. `fit`: shortens ids of other servers."""
    num_calls, opened = 0, _OpenCalls()
    for message in messages:
        for call in message.get("tool_calls") or ():
            num_calls += 1
            call["id"] = fit(str(call.get("id") or f"{num_calls:0{MISTRAL_ID_CHARS}d}"))
            opened.add(call["id"], _name_of(call))
        if _is_result(message):
            given = message.get("tool_call_id")
            id = fit(given) if given else opened.first(message.get("name"))
            if id is not None:
                opened.close(id)
                message["tool_call_id"] = id


class _OpenCalls:
    """Calls without results. A result without id is of the function's first one, else the first."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._by_name: dict[str | None, deque[str]] = {}
        self._all: deque[str] = deque()

    def add(self, id: str, name: str | None) -> None:
        self._ids.add(id)
        self._by_name.setdefault(name, deque()).append(id)
        self._all.append(id)

    def close(self, id: str) -> None:
        self._ids.discard(id)

    def first(self, name: str | None) -> str | None:
        for queue in (self._by_name.get(name, self._all), self._all):
            while queue and queue[0] not in self._ids:
                queue.popleft()
            if queue:
                return queue[0]
        return None


def _calls_apart(message: dict[str, Any]) -> list[dict[str, Any]]:
    if not message.get("tool_calls"):
        return [message]
    said = [{name: value for name, value in message.items() if name != "tool_calls"}] if message["content"] else []
    calls = {name: message[name] for name in ("role", "tool_calls")} if said else message
    return [*said, {**calls, "content": None}]


def _one_call_a_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if len(message.get("tool_calls") or ()) < 2:
            found.append(message)
            continue
        results = []
        while rest and _is_result(rest[0]):
            results.append(rest.popleft())
        found += _spread(message, results)
    return found


def _spread(message: dict[str, Any], results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    head, waiting = message, {result.get("tool_call_id"): result for result in reversed(results)}
    placed = set[int]()
    for call in message["tool_calls"]:
        yield {**head, "tool_calls": [call]}
        head = {"role": message["role"], "content": ""}
        if call["id"] in waiting:
            answer = waiting.pop(call["id"])
            placed.add(id(answer))
            yield answer
    yield from (result for result in results if id(result) not in placed)


def _is_result(message: dict[str, Any]) -> bool:
    return message["role"] in RESULTS


def _name_of(call: dict[str, Any]) -> str | None:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
