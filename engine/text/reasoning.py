"""Reasoning before an answer: markers, prompts, text and tokens.

answer:  <think> reasoning </think> text and tool calls

The prompt may end with <think> (OPEN) or </think> (CLOSED); otherwise the first text decides.
"""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from engine.text.json_value import JsonValue
from engine.text.parts import PartReader, split_at
from engine.text.sample import Arguments, CallBegins, Part, PlainText, ReasoningText


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`answer`: marker of the answer, default `end`. `forced`: text that ends reasoning. `always`:
    reasons unless the prompt ends it. `calls_end_it`: so does a tool call.
    """

    start: str = "<think>"
    end: str = "</think>"
    answer: str = ""
    forced: str = ""
    always: bool = False
    calls_end_it: bool = False

    @property
    def before_answer(self) -> str:
        return self.answer or self.end

    @property
    def way_out(self) -> str:
        return self.forced or self.before_answer


HARMONY = ReasoningFormat(
    start="<|channel|>analysis",
    end="<|end|>",
    answer="<|channel|>final<|message|>",
    forced="<|end|><|start|>assistant<|channel|>final<|message|>",
)
_THINK = ReasoningFormat()
_ALWAYS = ReasoningFormat(always=True)
_CALLS_END_IT = ReasoningFormat(calls_end_it=True)
REASONING_FORMATS = {
    "deepseek-r1": _ALWAYS,
    "deepseek-v3": _THINK,
    "deepseek_r1": _ALWAYS,
    "deepseek_v3": _THINK,
    "glm45": _CALLS_END_IT,
    "gpt-oss": HARMONY,
    "kimi": ReasoningFormat(start="◁think▷", end="◁/think▷"),
    "kimi_k2": _CALLS_END_IT,
    "minimax": _ALWAYS,
    "mistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "nemotron_3": _CALLS_END_IT,
    "openai_gptoss": HARMONY,
    "qwen3": _CALLS_END_IT,
    "qwen3-thinking": ReasoningFormat(always=True, calls_end_it=True),
    "step3": _ALWAYS,
}


class Opening(Enum):
    """The reasoning at a prompt's end."""

    OPEN = "open"
    CLOSED = "closed"
    UNDECIDED = "undecided"


def opening_of(format: ReasoningFormat, prompt: str, *, prefix: str = "") -> Opening:
    """`prefix`: start of the answer in the prompt (`continue_final_message`)."""
    prompt = prompt.rstrip()
    if format.before_answer in prefix or prompt.endswith(format.end):
        return Opening.CLOSED
    if format.start in prefix or prompt.endswith(format.start):
        return Opening.OPEN
    if format.always:
        return Opening.OPEN
    return Opening.CLOSED if prefix.strip() else Opening.UNDECIDED


class ReasoningTokens:
    """Counts reasoning tokens with markers. `ends`: any ends it."""

    def __init__(
        self, *, start: str, ends: tuple[str, ...], opening: Opening, token_bytes: Callable[[int], bytes]
    ) -> None:
        self._start = start.encode()
        self._ends = [end.encode() for end in ends]
        self._longest = max(map(len, self._ends))
        self._token_bytes = token_bytes
        self.opening = opening
        self._text = b""  # possibly part of a marker; a token may split a character
        self._num = 0

    @property
    def num(self) -> int:
        return 0 if self.opening is Opening.UNDECIDED else self._num

    def add(self, ids: Iterable[int]) -> None:
        for token in ids:
            if self.opening is Opening.CLOSED:
                return
            self._num += 1
            self._text += self._token_bytes(token)
            if self.opening is Opening.UNDECIDED:
                self._look_for_start()
            else:
                self._look_for_end()

    def _look_for_start(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._start):
            self.opening = Opening.OPEN
        elif not self._start.startswith(text):
            self.opening, self._num = Opening.CLOSED, 0

    def _look_for_end(self) -> None:
        if any(end in self._text for end in self._ends):
            self.opening = Opening.CLOSED
        self._text = self._text[-self._longest :]


class Trimmed:
    """Strips a growing text at both ends."""

    def __init__(self) -> None:
        self._space: list[str] = []
        self._begun = False

    def push(self, text: str) -> str:
        text = text if self._begun else text.lstrip()
        kept = text.rstrip()
        space = text[len(kept) :]
        if kept:
            self._begun = True
            kept = "".join((*self._space, kept))
            self._space.clear()
        self._space.append(space)
        return kept


class ReasoningReader:
    """Reads reasoning, then the answer with `after`. Strips space around markers.

    `interrupts`: ends reasoning and is left for `after`. `streams`: else reasoning is one part.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        opening: Opening,
        *,
        after: PartReader,
        streams: bool = True,
        interrupts: str = "",
    ) -> None:
        self._start = format.start
        self._ends = [marker for marker in (format.end, interrupts) if marker]
        self._keeps = interrupts
        self._after = after
        self._streams = streams
        self._opening = opening
        self._at_start = opening is not Opening.CLOSED  # a start marker may follow
        self._buffer = ""
        self._reasoning = Trimmed()
        self._held = ""  # reasoning, if not streamed
        self._fresh = False  # skip space before the answer

    @property
    def num_calls(self) -> int:
        return self._after.num_calls

    def feed(self, text: str) -> list[Part]:
        if self._has_ended():
            return self._answer(text)
        self._buffer += text
        if self._at_start and not self._read_start():
            return []
        return self._answer(self._rest()) if self._has_ended() else self._read_reasoning()

    def end(self) -> list[Part]:
        rest = self._rest()
        if self._opening is not Opening.OPEN:
            return self._answer(rest) + self._after.end()
        return [*self._reason(rest), *self._release(), *self._after.end()]

    def _has_ended(self) -> bool:
        return self._opening is Opening.CLOSED

    def _read_start(self) -> bool:
        text = self._buffer.lstrip()
        if len(text) < len(self._start) and self._start.startswith(text):
            return False
        self._at_start = False
        if text.startswith(self._start):
            self._opening, self._buffer = Opening.OPEN, text[len(self._start) :]
        elif self._opening is Opening.UNDECIDED:
            self._opening = Opening.CLOSED
        return True

    def _read_reasoning(self) -> list[Part]:
        text, marker, rest = split_at(self._buffer, self._ends)
        if not marker:
            self._buffer = rest
            return self._reason(text)
        self._buffer = ""
        self._opening, self._fresh = Opening.CLOSED, True
        rest = marker + rest if marker == self._keeps else rest
        return [*self._reason(text), *self._release(), *self._answer(rest)]

    def _reason(self, text: str) -> list[Part]:
        text = self._reasoning.push(text)
        if not self._streams:
            self._held, text = self._held + text, ""
        return [ReasoningText(text)] if text else []

    def _release(self) -> list[Part]:
        held, self._held = self._held, ""
        return [ReasoningText(held)] if held else []

    def _answer(self, text: str) -> list[Part]:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return self._after.feed(text) if text else []

    def _rest(self) -> str:
        rest, self._buffer = self._buffer, ""
        return rest


CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
HEADS = (CHANNEL, "to=", *ENDS)  # beginnings of a header
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class _ChannelCall:
    """A body that is no object stays text."""

    def __init__(self, header: str, name: str, index: int) -> None:
        self.begun = False
        self._header = header
        self._name = name
        self._index = index
        self._body = ""  # of the message
        self._at = 0  # characters of the body consumed by the arguments
        self._shown = 0  # characters of the body given out as text
        self._arguments = JsonValue()

    def feed(self, text: str) -> list[Part]:
        arguments, start = self._arguments, len(self._body)
        self._body += text
        if not (arguments.done or arguments.broken):
            self._at = start + arguments.feed(text)
        if arguments.first in ("", "n") and not arguments.broken:  # it may be empty or null
            return []
        if not self.begun and arguments.first != "{":
            return self._rest(0)
        parts = self._begin()
        if new := arguments.new():
            parts.append(Arguments(self._index, new))
        return parts + (self._rest(self._at) if arguments.done or arguments.broken else [])

    def end(self, *, cut: bool) -> list[Part]:
        """`cut`: the text ended before the message."""
        arguments = self._arguments
        if not (arguments.done or arguments.broken):
            arguments.end()
        if self.begun or self._shown:
            return [Arguments(self._index, new)] if self.begun and (new := arguments.new()) else []
        if self._body.strip() == "null" or (not self._body.strip() and not cut):
            return [*self._begin(), Arguments(self._index, "{}")]
        return self._rest(0)

    def _begin(self) -> list[Part]:
        was_started, self.begun = self.begun, True
        return [] if was_started else [CallBegins(self._index, self._name)]

    def _rest(self, start: int) -> list[Part]:
        start = max(start, self._shown)
        header = "" if self.begun or self._shown else self._header
        text = header + self._body[start:]
        if not self._shown and not text.strip():
            return []
        self._shown = len(self._body)
        return [PlainText(text)]


class HarmonyReader:
    """Reads channels of gpt-oss's Harmony format as parts.

    `names`: allowed functions. `answer`: reads messages of the final channel. `separates`: give out
    reasoning apart from text. `streams`: else reasoning is one part.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

    Source: openai/harmony, docs/format.md.
    """

    def __init__(
        self, names: Collection[str], *, answer: PartReader, separates: bool = True, streams: bool = True
    ) -> None:
        self._names = names
        self._answer = answer
        self._separates = separates
        self._streams = streams
        self._ended_calls = 0
        self._call: _ChannelCall | None = None  # the current call
        self._buffer = ""
        self._reasoning = ""  # of this message, if not streamed
        self._show: Callable[[str], list[Part]] | None = None  # of the current message; None in a header

    @property
    def num_calls(self) -> int:
        own = self._ended_calls + (self._call is not None and self._call.begun)
        return own + self._answer.num_calls

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while (new := self._read_header() if self._show is None else self._read_body(self._show)) is not None:
            parts += new
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        if self._show is not None:
            parts = self._show(self._buffer)
        elif not self._buffer.lstrip().startswith(HEADS):
            parts = self._answer.feed(self._buffer)
        self._buffer = ""
        return [*parts, *self._end_message(cut=True), *self._answer.end()]

    def _read_header(self) -> list[Part] | None:
        text = self._buffer.lstrip()
        if not any(text.startswith(head) or head.startswith(text) for head in HEADS):
            self._show = self._answer.feed  # no message: text
            return []
        header, found, rest = self._buffer.partition(MESSAGE)
        if not found:
            return None
        self._buffer = rest
        return self._open(header)

    def _open(self, header: str) -> list[Part]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._call = _ChannelCall(header + MESSAGE, recipient[1], self.num_calls)
            self._show = self._call.feed
            return []
        if channel is not None and channel[1] in ("final", "commentary") and recipient is None:
            self._show = self._answer.feed
            return []
        if recipient is None and self._separates:
            self._show = self._reason
            return []
        self._show = lambda text: [PlainText(text)] if text else []
        return [PlainText(header + MESSAGE)]

    def _read_body(self, show: Callable[[str], list[Part]]) -> list[Part] | None:
        text, marker, rest = split_at(self._buffer, ENDS)
        self._buffer = marker + rest if marker == START else rest
        if not marker:
            return show(text) if text else None
        self._show = None
        parts = show(text) if text else []
        return [*parts, *self._end_message(cut=False)]

    def _reason(self, text: str) -> list[Part]:
        if self._streams:
            return [ReasoningText(text)] if text else []
        self._reasoning += text
        return []

    def _end_message(self, *, cut: bool) -> list[Part]:
        call, self._call = self._call, None
        held, self._reasoning = self._reasoning, ""
        if call is None:
            return [ReasoningText(held)] if held else []
        parts = call.end(cut=cut)
        self._ended_calls += call.begun
        return parts
