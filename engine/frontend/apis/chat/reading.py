"""How a chat with tools or reasoning is constrained, and its answer read."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from engine.frontend.apis.chat.body import ChatBody
from engine.frontend.apis.chat.tools import (
    forced,
    forced_calls,
    names_one,
    refuse_strict,
    strict_calls,
    usable,
)
from engine.frontend.apis.shared.constraints import Constraint, only_one
from engine.frontend.apis.shared.samples import body_constraint
from engine.frontend.services import Services
from engine.sampling_params import ReasoningGate
from engine.text.parts import CustomInputs, PartReader, PlainReader, ShownParts, first_call, without_reasoning
from engine.text.reasoning import (
    HARMONY,
    HarmonyReader,
    Opening,
    ReasoningFormat,
    ReasoningReader,
    ReasoningTokens,
    opening_of,
)
from engine.text.tagged_call import Schemas
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import ARRAY, CALL_FORMATS, CallFormat, ToolCalls
from service.http.errors import bad_field, unsupported

log = logging.getLogger(__name__)

NO_PARSER = "this server was started without --tool-call-parser"

GPT_OSS = ("gpt-oss", "openai")  # its channels hold reasoning and calls: one reader for both


@dataclass(frozen=True, kw_only=True)
class Reading:
    """`reasoning`: format, shown apart (`separates`) or not at all (`leaves_out`). `calls`: format
    of parsed calls; `calls_in_channels`: harmony's. `functions`: allowed, with schemas; `customs`:
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
        reads = self.in_channels or self.separates or self.calls is not None
        return partial(self._make, opening) if reads else None

    def _make(self, opening: Opening) -> PartReader:
        reader: PartReader = PlainReader() if self.calls is None else ToolCalls(self.calls, self.functions)
        if self.in_channels:
            names = self.functions if self.calls_in_channels else ()
            reader = HarmonyReader(names, answer=reader, separates=self.separates, streams=self.streams)
        elif self.separates:
            assert self.reasoning is not None
            reader = ReasoningReader(
                self.reasoning, opening, after=reader, streams=self.streams, interrupts=self.interrupts
            )
        reader = ShownParts(reader, CustomInputs(self.customs).show) if self.customs else reader
        reader = ShownParts(reader, without_reasoning) if self.leaves_out else reader
        return ShownParts(reader, first_call) if self.only_one else reader


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


class Opened(NamedTuple):
    """Decisions of the rendered prompt. `reader`: of parts, None for plain text.

    `count_reasoning`: makes counters, if the model reasons.
    """

    gate: ReasoningGate | None = None
    reader: Callable[[], PartReader] | None = None
    count_reasoning: Callable[[], ReasoningTokens] | None = None


AS_TEXT = Opened()


def checked_reading(s: Services, body: ChatBody) -> Reading:
    """Raises ApiError(400). Makes the markers visible that the reader needs."""
    _check_reasoning(s, body, s.model.reasoning)
    reading = reading_of(body, reasoning=s.model.reasoning, tool_parser=s.spec.engine.tool_call_parser)
    _check_calls(body, reading)
    if body.skip_special_tokens is None and any(map(s.model.tokenizer.is_special, reading.markers)):
        body.skip_special_tokens = False
    return reading


def opened(s: Services, body: ChatBody, reading: Reading, prompt: str, prefix: str, *, is_constrained: bool) -> Opened:
    format = reading.reasoning
    if format is None:
        return Opened(reader=reading.reader(Opening.CLOSED))
    opening = opening_of(format, prompt, prefix=prefix)
    return Opened(
        gate=gate_of(format, opening, budget=body.thinking_token_budget, is_constrained=is_constrained),
        reader=reading.reader(opening),
        count_reasoning=partial(_counter, format, reading.interrupts, opening, s.model.tokenizer),
    )


def _check_calls(body: ChatBody, reading: Reading) -> None:
    """Explicit "auto" is rejected without parser, as in vLLM; else warn."""
    if not reading.functions or reading.calls is not None or reading.calls_in_channels:
        return
    if body.tool_choice == "auto":
        raise unsupported("tool_choice", f"auto: {NO_PARSER}; use required, or none")
    _warn_of_unread_calls()


@cache
def _warn_of_unread_calls() -> None:
    """Log once; the answers stay useful."""
    log.warning("a request has tools, and %s: calls by the model's choice stay text", NO_PARSER)


def _check_reasoning(s: Services, body: ChatBody, format: ReasoningFormat | None) -> None:
    if body.reasoning_effort == "none" and format is HARMONY:
        raise bad_field("reasoning_effort", "this model always reasons; use low, medium or high")
    check_budget(s, body.thinking_token_budget, field="thinking_token_budget")


def _counter(format: ReasoningFormat, interrupts: str, opening: Opening, tokenizer: Tokenizer) -> ReasoningTokens:
    ends = tuple(marker for marker in (format.end, interrupts) if marker)
    return ReasoningTokens(start=format.start, ends=ends, opening=opening, token_bytes=tokenizer.token_bytes)


def chat_constraint(body: ChatBody, format: CallFormat | None, *, in_channels: bool = False) -> Constraint | None:
    """Forced calls as constraint; strict functions apply only without another.

    `in_channels`: harmony calls, without schema support.
    """
    tools, plain = usable(body.tools, body.tool_choice), body_constraint(body)
    if forced(body.tool_choice):
        only = names_one(body.tool_choice) or body.parallel_tool_calls is False
        return only_one(forced_calls(tools, only_one=only), plain)
    if plain is None and in_channels:
        refuse_strict(tools)
    return plain or (strict_calls(tools, format) if format is not None else None)


# ---- Reasoning that the engine tracks for a constraint or a budget.


def needed_format(s: Services, *, field: str) -> ReasoningFormat:
    """Raises ApiError(400) without one."""
    format = s.model.reasoning
    if format is None:
        raise unsupported(field, "this server was started without --reasoning-parser")
    return format


def check_budget(s: Services, budget: int | None, *, field: str) -> None:
    """Raises ApiError(400)."""
    if budget is None:
        return
    format, tokenizer = needed_format(s, field=field), s.model.tokenizer
    if budget < 0:
        raise bad_field(field, f"must be at least 0, got {budget}")
    ids = tokenizer.encode(format.way_out, add_special_tokens=False)
    if format.before_answer not in tokenizer.decode(ids, skip_special_tokens=False):
        raise bad_field(
            field,
            f"this model's tokenizer cannot write {format.way_out!r}; start the server with another --reasoning-parser",
        )


def gate_of(
    format: ReasoningFormat, opening: Opening, *, budget: int | None, is_constrained: bool
) -> ReasoningGate | None:
    """None if the engine need not track it."""
    if opening is Opening.CLOSED or not (is_constrained or budget is not None):
        return None
    if format.answer:  # the answer's marker always comes
        opening = Opening.OPEN
    return ReasoningGate(
        start=format.start, end=format.before_answer, forced=format.way_out, opening=opening.value, budget=budget
    )
