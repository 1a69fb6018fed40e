"""Harmony format of gpt-oss: an answer is messages in channels.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>final<|message|>text<|return|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Source: openai/harmony, docs/format.md.
"""

import re
from collections.abc import Callable, Collection

from engine.text.json_value import JsonValue
from engine.text.parts import Arguments, CallBegins, Part, PartReader, PlainText, ReasoningText, overlap

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
HEADS = (CHANNEL, "to=", *ENDS)  # beginnings of a header
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class _ChannelCall:
    """A message that is a call; a body that is no object stays text."""

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
        was_begun, self.begun = self.begun, True
        return [] if was_begun else [CallBegins(self._index, self._name)]

    def _rest(self, start: int) -> list[Part]:
        start = max(start, self._shown)
        header = "" if self.begun or self._shown else self._header
        text = header + self._body[start:]
        if not self._shown and not text.strip():
            return []
        self._shown = len(self._body)
        return [PlainText(text)]


class HarmonyReader:
    """Reads harmony's channels as parts.

    `names`: allowed functions. `answer`: reads messages of the final channel. `separates`: give out
    reasoning apart from text. `streams`: else reasoning is one part.
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
        while (new := self._step()) is not None:
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

    def _step(self) -> list[Part] | None:
        return self._read_header() if self._show is None else self._read_body(self._show)

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
        found = [(at, marker) for marker in ENDS if (at := self._buffer.find(marker)) >= 0]
        if not found:
            held = max(overlap(self._buffer, marker) for marker in ENDS)
            text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
            return show(text) if text else None
        at, marker = min(found)
        text = self._buffer[:at]
        self._buffer = self._buffer[at:] if marker == START else self._buffer[at + len(marker) :]
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
