"""Reader of a chat's answer, by the model's formats and the request. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.frontend.apis.chat.body import ChatBody
from engine.frontend.apis.chat.tools import forced, usable
from engine.text.call_formats import ARRAY, CALL_FORMATS, CallFormat
from engine.text.custom_calls import CustomInputs
from engine.text.harmony import HarmonyReader
from engine.text.parts import FirstCall, PartReader, PlainReader, WithoutReasoning
from engine.text.reasoning import HARMONY, Opening, ReasoningFormat, ReasoningReader
from engine.text.tagged_call import Schemas
from engine.text.tool_calls import ToolCalls

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
