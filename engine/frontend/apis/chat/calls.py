"""Tool calls in answers (ids by the model's style) and histories. Pure."""

import hashlib
import re
import string
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.frontend.apis.chat.body import ChatBody, ChatMessage
from engine.frontend.apis.chat.tools import forced, usable
from engine.text.chat_template import ChatTemplate
from engine.text.parts import CustomInputs, FirstCall, PartReader, PlainReader, WithoutReasoning
from engine.text.reasoning import HARMONY, HarmonyReader, Opening, ReasoningFormat, ReasoningReader
from engine.text.tagged_call import Schemas
from engine.text.template_reads import MISTRAL_ID_CHARS, TemplateReads
from engine.text.tool_calls import ARRAY, CALL_FORMATS, CallFormat, ToolCalls

MintId = Callable[[str, int], str]  # of function name and index of the call

RESULTS = ("tool", "function")
_SHORT = re.compile(rf"[a-zA-Z0-9]{{{MISTRAL_ID_CHARS}}}", re.ASCII)
_LETTERS = string.digits + string.ascii_letters


@dataclass(frozen=True, kw_only=True)
class CallIds:
    """Makes call ids. `num_before`: calls so far (Kimi). `is_short`: nine characters (Mistral)."""

    is_short: bool = False
    counts: bool = False
    num_before: int = 0

    def minted_by(self, mint: Callable[[str], str], prefix: str) -> MintId:
        if self.counts:
            return lambda name, index: f"functions.{name}:{self.num_before + index}"
        if self.is_short:
            return lambda name, index: short_id(mint(prefix))
        return lambda name, index: mint(prefix)


def call_ids(parser: str | None, template: ChatTemplate | None, *, messages: list[ChatMessage]) -> CallIds:
    demands_short = template is not None and template.reads.short_ids
    return CallIds(
        is_short=demands_short or parser == "mistral",
        counts=parser == "kimi_k2",
        num_before=sum(len(message.tool_calls or ()) for message in messages),
    )


def short_id(id: str) -> str:
    """`id` if of nine letters and digits, else such a hash of it."""
    if _SHORT.fullmatch(id):
        return id
    digest = hashlib.blake2b(id.encode(errors="replace"), digest_size=MISTRAL_ID_CHARS).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def as_taken(messages: list[dict[str, Any]], reads: TemplateReads) -> list[dict[str, Any]]:
    """Adapt calls and results to the template."""
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
    """Calls without results.

    A result without id matches the function's first one, else the first.
    """

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


# ---- Reader of a chat's answer, by the model's formats and the request. Pure.

GPT_OSS = ("gpt-oss", "openai")  # its channels hold reasoning and calls: one reader for both


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the answer to a chat is read.

    `reasoning`: format, shown apart (`separates`) or not at all (`leaves_out`). `calls`: format of
    parsed calls; `calls_in_channels`: harmony's. `functions`: allowed, with schemas; `customs`:
    those with text input. `only_one`: drop later calls.
    """

    reasoning: ReasoningFormat | None
    separates: bool
    leaves_out: bool
    streams: bool
    calls: CallFormat | None
    calls_in_channels: bool
    functions: Schemas
    customs: frozenset[str]
    only_one: bool

    @property
    def in_channels(self) -> bool:
        return self.calls_in_channels or (self.separates and self.reasoning is HARMONY)

    @property
    def markers(self) -> list[str]:
        """Markers that must be visible, even if special tokens."""
        if self.in_channels:
            return ["<|channel|>"]
        shown = [self.reasoning.start, self.reasoning.end] if self.separates and self.reasoning is not None else []
        return shown + (list(self.calls.marks) if self.calls is not None else [])

    @property
    def interrupts(self) -> str:
        """The tool call marker, if it ends reasoning."""
        ends = self.reasoning is not None and self.reasoning.calls_end_it
        return self.calls.marker if ends and self.calls is not None else ""

    def reader(self, opening: Opening) -> Callable[[], PartReader] | None:
        """A factory of readers, None for plain text."""
        make = self._maker(opening)
        if make is None or not (self.only_one or self.customs or self.leaves_out):
            return make
        return lambda: self._wrapped(make())

    def _wrapped(self, reader: PartReader) -> PartReader:
        reader = CustomInputs(reader, self.customs) if self.customs else reader
        reader = WithoutReasoning(reader) if self.leaves_out else reader
        return FirstCall(reader) if self.only_one else reader

    def _maker(self, opening: Opening) -> Callable[[], PartReader] | None:
        if self.in_channels:
            return self._harmony
        if self.separates:
            return lambda: self._reasoning(opening)
        return None if self.calls is None else self._after

    def _harmony(self) -> PartReader:
        names = self.functions if self.calls_in_channels else ()
        return HarmonyReader(names, answer=self._after(), separates=self.separates, streams=self.streams)

    def _reasoning(self, opening: Opening) -> PartReader:
        assert self.reasoning is not None
        return ReasoningReader(
            self.reasoning,
            opening,
            after=self._after(),
            streams=self.streams,
            interrupts=self.interrupts,
        )

    def _after(self) -> PartReader:
        return PlainReader() if self.calls is None else ToolCalls(self.calls, self.functions)


def reading_of(body: ChatBody, *, reasoning: ReasoningFormat | None, tool_parser: str | None) -> Reading:
    tools = usable(body.tools, body.tool_choice)
    is_forced, leaves_out = forced(body.tool_choice), body.include_reasoning is False
    calls = ARRAY if is_forced else CALL_FORMATS.get(tool_parser or "") if tools else None
    return Reading(
        reasoning=reasoning,
        separates=reasoning is not None and (body.separate_reasoning is not False or leaves_out),
        leaves_out=leaves_out,
        streams=body.stream_reasoning is not False,
        calls=calls,
        calls_in_channels=tool_parser in GPT_OSS and bool(tools) and not is_forced,
        functions={tool.function.name: tool.function.parameters for tool in tools},
        customs=frozenset(tool.function.name for tool in tools if tool.type == "custom"),
        only_one=bool(tools) and body.parallel_tool_calls is False,
    )
