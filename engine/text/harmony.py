"""The harmony format of gpt-oss: an answer is messages in channels. Pure.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Source: openai/harmony, docs/format.md.
"""

import re
from collections.abc import Callable, Collection

from engine.text.parts import Arguments, CallBegins, Part, PartReader, PlainText, ReasoningText, overlap

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
HEADS = (CHANNEL, "to=", *ENDS)  # how a header begins
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyReader:
    """`names`: functions that may be called. `answer`: reads the text of the final channel, all messages of it.

    Without `separates`, reasoning stays in the text as the model wrote it. `streams`: false gives reasoning out as one part.
    """

    def __init__(
        self, names: Collection[str], *, answer: PartReader, separates: bool = True, streams: bool = True
    ) -> None:
        self._names = names
        self._answer = answer
        self._separates = separates
        self._streams = streams
        self._own_calls = 0
        self._buffer = ""
        self._reasoning = ""  # of this message, while it is not streamed
        self._show: Callable[[str], list[Part]] | None = None  # of the message that is being read; None: in a header

    @property
    def num_calls(self) -> int:
        return self._own_calls + self._answer.num_calls

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
        return [*parts, *self._release(), *self._answer.end()]

    def _step(self) -> list[Part] | None:
        """Parts of the next piece of the buffer; None: more must come."""
        return self._read_header() if self._show is None else self._read_body(self._show)

    def _read_header(self) -> list[Part] | None:
        text = self._buffer.lstrip()
        if not any(text.startswith(head) or head.startswith(text) for head in HEADS):
            self._show = self._answer.feed  # no message at all: text
            return []
        header, found, rest = self._buffer.partition(MESSAGE)
        if not found:
            return None
        self._buffer = rest
        return self._open(header)

    def _open(self, header: str) -> list[Part]:
        """The message's kind by its header."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            index = self.num_calls
            self._own_calls += 1
            self._show = lambda text: [Arguments(index, text)] if text else []
            return [CallBegins(index, recipient[1])]
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
        return [*show(text), *self._release()] if text else self._release()

    def _reason(self, text: str) -> list[Part]:
        if self._streams:
            return [ReasoningText(text)] if text else []
        self._reasoning += text
        return []

    def _release(self) -> list[Part]:
        held, self._reasoning = self._reasoning, ""
        return [ReasoningText(held)] if held else []
