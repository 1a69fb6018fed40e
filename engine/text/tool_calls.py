"""Incremental parser of tool calls; chunks do not matter.

TEXT --marker--> OPEN --opener--> CALL (scanner) --end--> AFTER --separator, opener--> OPEN
                                                           \\--closer, or anything else--> TEXT

Text that only looks like a call (no name, unknown function, arguments not an object) stays text. A
call may be sent before it ends: a format error closes it, and the rest is text. Formats:
call_formats.py.
"""

from enum import Enum

from engine.text.call_formats import CallFormat, CallScanner
from engine.text.parts import Arguments, CallBegins, Part, PlainText, overlap
from engine.text.tagged_call import Schemas


class _Stage(Enum):
    TEXT = "text"
    OPEN = "open"  # expects a call
    CALL = "call"
    AFTER = "after"  # after a call


class ToolCalls:
    """Parser of one answer. `functions`: allowed ones, with schemas."""

    def __init__(self, format: CallFormat, functions: Schemas) -> None:
        self._format = format
        self._functions = functions
        self._follows = _follows(format)
        self._stage = _Stage.TEXT
        self._buffer = ""  # not read yet
        self._raw = ""  # read since the text ended, in case it is text after all
        self._space: list[str] = []  # after the text so far; given out if text follows
        self._at_start = True
        self._may_bracket = False  # the optional bracket may follow
        self._scanner: CallScanner = format.scanner(functions)
        self._begun = False  # `CallBegins` was sent for the current call
        self._parts: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        while self._buffer and _STEPS[self._stage](self):
            pass
        return self._taken()

    def end(self) -> list[Part]:
        if self._stage is _Stage.CALL:
            self._scanner.end()
            self._show_call()
        if not self._begun:
            self._emit(self._raw + self._buffer)
        if not self.num_calls and (space := "".join(self._space)):
            self._parts.append(PlainText(space))
        self._buffer = self._raw = ""
        return self._taken()

    # ---- stages: each reads the buffer and returns whether to continue

    def _read_text(self) -> bool:
        if self._at_start and self._format.bare:
            rest = self._buffer.lstrip()
            if not rest:
                return False
            self._at_start = False
            if rest.startswith(self._format.bare):
                self._begin("", self._buffer[: len(self._buffer) - len(rest)], rest)
                return True
        marks = self._format.marks
        found = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            opens = at + len(mark) * (mark == self._format.marker)
            self._begin(self._buffer[:at], self._buffer[at:opens], self._buffer[opens:])
            return True
        held = max((overlap(self._buffer, mark) for mark in marks), default=0)
        self._emit(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _begin(self, text: str, raw: str, rest: str) -> None:
        self._emit(text)
        self._raw, self._buffer = raw, rest
        self._may_bracket = bool(self._format.bracket)
        self._enter(_Stage.OPEN)

    def _read_open(self) -> bool:
        if self._skip_space():
            return False
        if self._may_bracket and self._buffer.startswith(self._format.bracket):
            self._may_bracket = False
            self._move(len(self._format.bracket))
        elif self._buffer.startswith(self._format.opener):
            self._scanner = self._format.scanner(self._functions)
            self._enter(_Stage.CALL)
        elif self._format.opener.startswith(self._buffer):
            return False
        else:
            self._finish_call(0, _Stage.TEXT)
        return True

    def _read_call(self) -> bool:
        scanner = self._scanner
        self._move(scanner.feed(self._buffer))
        self._show_call()
        if scanner.broken:
            self._finish_call(0 if self._raw else 1, _Stage.TEXT)  # else it would find the same opener again
        elif scanner.done:
            self._stage = _Stage.AFTER
        return bool(self._buffer)

    def _read_after(self) -> bool:
        if self._skip_space():
            return False
        marker = next((m for m in self._follows if self._buffer.startswith(m)), None)
        if marker is not None:
            _FOLLOW[self._follows[marker]](self, marker)
        elif any(m.startswith(self._buffer) for m in self._follows):
            return False
        else:
            self._finish_call(0, _Stage.TEXT)
        return True

    # ---- moves

    def _show_call(self) -> None:
        scanner = self._scanner
        if scanner.name in self._functions and not self._begun:
            self._begun = True
            assert scanner.name is not None
            self._parts.append(CallBegins(self.num_calls, scanner.name, scanner.id))
            self.num_calls += 1
        if self._begun and (new := scanner.new_arguments()):
            self._parts.append(Arguments(self.num_calls - 1, new))

    def _finish_call(self, length: int, stage: _Stage) -> None:
        self._move(length)
        if not self._begun:
            self._emit(self._raw)
        self._raw = ""
        self._enter(stage)

    def _enter(self, stage: _Stage) -> None:
        self._stage, self._begun = stage, False

    def _next_call(self, marker: str) -> None:
        self._finish_call(len(marker) if marker == self._format.separator else 0, _Stage.OPEN)

    def _close(self, marker: str) -> None:
        self._finish_call(len(marker), _Stage.TEXT)

    def _fill(self, marker: str) -> None:
        self._move(len(marker))

    def _move(self, length: int) -> None:
        """Mark as read; negative: as unread."""
        at = len(self._raw) + length
        text = self._raw + self._buffer
        self._raw, self._buffer = text[:at], text[at:]

    def _skip_space(self) -> bool:
        self._move(len(self._buffer) - len(self._buffer.lstrip()))
        return not self._buffer

    def _emit(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._parts.append(PlainText("".join((*self._space, kept))))
            self._space.clear()
        self._space.append(text[len(kept) :])

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


_STEPS = {
    _Stage.TEXT: ToolCalls._read_text,
    _Stage.OPEN: ToolCalls._read_open,
    _Stage.CALL: ToolCalls._read_call,
    _Stage.AFTER: ToolCalls._read_after,
}


class _Follow(Enum):
    NEXT = "next"
    FILLER = "filler"
    CLOSER = "closer"


_FOLLOW = {
    _Follow.NEXT: ToolCalls._next_call,
    _Follow.FILLER: ToolCalls._fill,
    _Follow.CLOSER: ToolCalls._close,
}


def _follows(format: CallFormat) -> dict[str, _Follow]:
    opens = format.separator or (format.opener if len(format.opener) > 1 else "")
    found = dict.fromkeys(format.fillers, _Follow.FILLER) | {format.closer: _Follow.CLOSER, opens: _Follow.NEXT}
    return {marker: follow for marker, follow in found.items() if marker}
