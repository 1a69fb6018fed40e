"""Reads tool calls out of a growing text, format by format: the same parts whatever the chunks. Pure.

A call is a JSON object {"name": ..., "arguments" | "parameters": {...}}; formats differ in what stands around it:

    qwen25   text <tool_call>\\n{...}\\n</tool_call>\\n<tool_call>...   (Qwen 2.5, Qwen 3, Hermes)
    llama3   {...}; {...}      or  text <|python_tag|>{...}; {...}     (Llama 3.1, 3.2, 3.3)
    array    [{...}, {...}]                                            (a forced call, any model)

Text that only looks like a call (no JSON, no name, an unknown function) stays text.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from engine.text.parts import Arguments, CallBegins, Part, PlainText, overlap

ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`marker`: text before a call. `bare`: a text that begins with it is calls. `separator`: between two objects.

    `closer`: after the last. `trigger`, `begin`, `end`: the format as a structural tag, with NAME for the function's.
    """

    marker: str = ""
    bare: str = ""
    separator: str = ""
    closer: str = ""
    trigger: str = ""
    begin: str = ""
    end: str = ""


QWEN25 = CallFormat(
    marker="<tool_call>",
    closer="</tool_call>",
    trigger="<tool_call>",
    begin='<tool_call>\n{"name": "NAME", "arguments": ',
    end="}\n</tool_call>",
)
LLAMA3 = CallFormat(
    marker="<|python_tag|>",
    bare="{",
    separator=";",
    trigger="<|python_tag|>",
    begin='<|python_tag|>{"name": "NAME", "parameters": ',
    end="}",
)
ARRAY = CallFormat(bare="[", separator=",", closer="]")
CALL_FORMATS = {"qwen25": QWEN25, "qwen": QWEN25, "llama3": LLAMA3}


class CallScanner:
    """One JSON object, character by character: strings, depth, keys and values. `broken`: this is no call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.broken = False
        self.done = False
        self._raw = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string_at = 0
        self._key: object = None
        self._value_at: int | None = None  # of the value at depth 1 that is being read
        self._arguments: tuple[int, int | None] | None = None  # where they begin and end
        self._sent = 0

    def feed(self, text: str) -> int:
        """Characters taken: all, or up to the closing brace."""
        start = len(self._raw)
        self._raw += text
        for i, c in enumerate(text):
            self._take(c, start + i)
            if self.done or self.broken:
                self._raw = self._raw[: start + i + 1]
                return i + 1
        return len(text)

    def new_arguments(self) -> str:
        """New text of the arguments, without trailing space, which may not be theirs."""
        whole = self._arguments_text()
        new, self._sent = whole[self._sent :], max(self._sent, len(whole))
        return new

    def _arguments_text(self) -> str:
        if self._arguments is None:
            return "{}" if self.done else ""
        start, end = self._arguments
        text = self._raw[start:end].strip()
        if not text.startswith('"'):
            return text
        return str(_loaded(text) or "") if end is not None else ""  # the arguments' JSON, as a JSON string

    def _take(self, c: str, at: int) -> None:
        if self._in_string:
            self._take_in_string(c, at)
        elif c == '"':
            self._in_string, self._string_at = True, at
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(at)
                self.done, self.broken = self.name is not None, self.name is None
        elif c == ":" and self._depth == 1 and self._value_at is None:
            self._begin_value(at + 1)
        elif c == "," and self._depth == 1:
            self._end_value(at)

    def _take_in_string(self, c: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            if self._depth == 1 and self._value_at is None:
                self._key = _loaded(self._raw[self._string_at : at + 1])

    def _begin_value(self, at: int) -> None:
        self._value_at = at
        if self._key in ARGUMENT_KEYS and self._arguments is None:
            self._arguments = (at, None)

    def _end_value(self, at: int) -> None:
        start, self._value_at = self._value_at, None
        if start is None:
            return
        if self._arguments == (start, None):
            self._arguments = (start, at)
        if self._key == "name" and self.name is None:
            name = _loaded(self._raw[start:at])
            self.name, self.broken = (name, False) if isinstance(name, str) else (None, True)


class _Stage(Enum):
    TEXT = "text"
    OPEN = "open"  # an object must come
    CALL = "call"
    AFTER = "after"  # an object has ended


class ToolCalls:
    """The parts of one answer. `names`: functions that may be called."""

    def __init__(self, format: CallFormat, names: Collection[str]) -> None:
        self._format = format
        self._names = names
        self._stage = _Stage.TEXT
        self._buffer = ""  # not read yet
        self._raw = ""  # read since the text ended, in case it was text after all
        self._space = ""  # leading space of a text: counts only if more text comes
        self._at_start = True
        self._scanner = CallScanner()
        self._begun = False  # `CallBegins` was sent for the current call
        self._parts: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        while self._buffer and _STEPS[self._stage](self):
            pass
        return self._taken()

    def end(self) -> list[Part]:
        if not self._begun:
            self._emit(self._raw + self._buffer)
        if not self.num_calls and self._space:
            self._parts.append(PlainText(self._space))
        self._buffer = self._raw = self._space = ""
        return self._taken()

    # ---- stages: each looks at the buffer and returns whether to go on

    def _read_text(self) -> bool:
        if self._at_start and self._format.bare:
            rest = self._buffer.lstrip()
            if not rest:
                return False
            self._at_start = False
            if rest.startswith(self._format.bare):
                self._raw = self._buffer[: len(self._buffer) - len(rest)]
                self._buffer = rest
                if self._format.bare != "{":
                    self._move(len(self._format.bare))
                self._enter(_Stage.OPEN)
                return True
        before, marker, after = self._buffer.partition(self._format.marker) if self._format.marker else ("", "", "")
        if marker:
            self._emit(before)
            self._raw, self._buffer = marker, after
            self._enter(_Stage.OPEN)
            return True
        held = overlap(self._buffer, self._format.marker)
        self._emit(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _read_open(self) -> bool:
        if self._skip_space():
            return False
        if self._buffer[0] != "{":
            self._finish_call(0, _Stage.TEXT)
        else:
            self._scanner = CallScanner()
            self._enter(_Stage.CALL)
        return True

    def _read_call(self) -> bool:
        scanner = self._scanner
        self._move(scanner.feed(self._buffer))
        if scanner.name in self._names and not self._begun:
            self._begun = True
            assert scanner.name is not None
            self._parts.append(CallBegins(self.num_calls, scanner.name))
            self.num_calls += 1
        if self._begun and (new := scanner.new_arguments()):
            self._parts.append(Arguments(self.num_calls - 1, new))
        if scanner.broken:
            self._finish_call(0, _Stage.TEXT)
        elif scanner.done:
            self._stage = _Stage.AFTER
        return True

    def _read_after(self) -> bool:
        if self._skip_space():
            return False
        separator, closer = self._format.separator, self._format.closer
        if separator and self._buffer.startswith(separator):
            self._finish_call(len(separator), _Stage.OPEN)
        elif closer and self._buffer.startswith(closer):
            self._finish_call(len(closer), _Stage.TEXT)
        elif closer and closer.startswith(self._buffer):
            return False
        else:
            self._finish_call(0, _Stage.TEXT)
        return True

    # ---- moves

    def _finish_call(self, length: int, stage: _Stage) -> None:
        self._move(length)
        if not self._begun:
            self._emit(self._raw)
        self._raw = ""
        self._enter(stage)

    def _enter(self, stage: _Stage) -> None:
        self._stage, self._begun = stage, False

    def _move(self, length: int) -> None:
        self._raw += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _skip_space(self) -> bool:
        """Whether nothing is left."""
        self._move(len(self._buffer) - len(self._buffer.lstrip()))
        return not self._buffer

    def _emit(self, text: str) -> None:
        text = self._space + text
        self._space = "" if text.strip() else text
        if text.strip():
            self._space = text[len(text.rstrip()) :]
            self._parts.append(PlainText(text.rstrip()))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


_STEPS = {
    _Stage.TEXT: ToolCalls._read_text,
    _Stage.OPEN: ToolCalls._read_open,
    _Stage.CALL: ToolCalls._read_call,
    _Stage.AFTER: ToolCalls._read_after,
}


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
