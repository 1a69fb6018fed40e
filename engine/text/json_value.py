"""Incremental JSON value that can be closed at any time, without taking text back.

Fixes slips: raw line breaks in strings, unknown escapes, trailing commas, Python constants. Other
errors end and close the value.
"""

import json
import re
from collections.abc import Callable
from typing import Any

SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_RUN = re.compile(r'[^"\\\x00-\x1f]*')  # characters unescaped in a string
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = "u[dD][89abAB]", "u[dD][c-fC-F]"  # surrogate pairs
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|(?!{_HIGH}|{_LOW})u{_HEX}{{4}}|{_HIGH}{_HEX}{{2}}\\{_LOW}{_HEX}{{2}})')
_ESCAPE_BEGINS = re.compile(rf"\\(?:u{_HEX}{{0,3}}|{_HIGH}{_HEX}{{2}}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?")
_HALF = re.compile(rf"\\(?:{_HIGH}|{_LOW}){_HEX}{{2}}")
_REPLACEMENT = r"\ufffd"
_SCALAR_CHARS = re.compile(r"[-+.\w]", re.ASCII)
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def json_text(value: Any) -> str:
    """Letters stay unescaped. Raises ValueError for NaN or infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="replace").decode()  # a lone surrogate is no character


class JsonValue:
    """`first`: its first character. `done`: complete. `broken`: the text cannot belong to it."""

    def __init__(self) -> None:
        self.first = ""
        self.done = False
        self.broken = False
        self._step: Callable[[JsonValue, str, int], int] = JsonValue._read_value  # the next one
        self._open: list[str] = []  # closing brackets of open ones, the next one last
        self._held = ""  # comma, key, colon, space: given out once a value follows
        self._num_held = 0  # characters not given out: `_held` and a scalar
        self._comma = False  # a comma is last in `_held`
        self._scalar = ""
        self._escape = ""  # its beginning
        self._new = ""

    def feed(self, text: str, at: int = 0) -> int:
        """The value's end, negative if in an earlier text.

        A broken value ends before what was held back.
        """
        while at < len(text) and not self.done and not self.broken:
            at = self._step(self, text, at)
        return at - self._num_held if self.broken else at

    def end(self) -> None:
        """Close the value; drop what was held back. An unstarted value is broken."""
        if not self.done and not self.broken:
            whole = self._finish_scalar() or bool(self._open) or self._step is JsonValue._read_in_string
            self._close()
            self.done, self.broken = whole, not whole

    def new(self) -> str:
        new, self._new = self._new, ""
        return new

    # ---- steps: each reads from `at` and returns where it stopped

    def _read_value(self, text: str, at: int) -> int:
        c = text[at]
        if c in SPACE:
            return self._hold(c, at) if self.first else at + 1
        if c in _CLOSERS:
            self._give(c)
            self._open.append(_CLOSERS[c])
            self._step = JsonValue._read_key if c == "{" else JsonValue._read_item
        elif c == '"':
            self._give(c)
            self._step = JsonValue._read_in_string
        elif _SCALAR_CHARS.match(c):
            self.first = self.first or c
            self._step = JsonValue._read_in_scalar
            return at
        else:
            return self._break(at)
        return at + 1

    def _read_item(self, text: str, at: int) -> int:
        if text[at] == "]":
            return self._end_bracket(at)
        if text[at] not in SPACE:
            self._step = JsonValue._read_value
        return self._read_value(text, at)

    def _read_key(self, text: str, at: int) -> int:
        c = text[at]
        if c in SPACE:
            return self._hold(c, at)
        if c == "}":
            return self._end_bracket(at)
        if c != '"':
            return self._break(at)
        self._step = JsonValue._read_in_key
        return self._hold(c, at)

    def _read_colon(self, text: str, at: int) -> int:
        c = text[at]
        if c == ":":
            self._step = JsonValue._read_value
        elif c not in SPACE:
            return self._break(at)
        return self._hold(c, at)

    def _read_next(self, text: str, at: int) -> int:
        c = text[at]
        if c in SPACE:
            return self._hold(c, at)
        if c == self._open[-1]:
            return self._end_bracket(at)
        if c != ",":
            return self._break(at)
        self._step = JsonValue._read_key if self._open[-1] == "}" else JsonValue._read_item
        self._comma = True
        return self._hold(c, at)

    def _read_in_key(self, text: str, at: int) -> int:
        end, shown, ended = self._string(text, at)
        self._held += shown
        self._num_held += end - at
        self._step = JsonValue._read_colon if ended else JsonValue._read_in_key
        return end

    def _read_in_string(self, text: str, at: int) -> int:
        end, shown, ended = self._string(text, at)
        self._new += shown
        if ended:
            self._end_value()
        return end

    def _read_in_scalar(self, text: str, at: int) -> int:
        if _SCALAR_CHARS.match(text[at]):
            self._scalar += text[at]
            self._num_held += 1
            return at + 1
        return at if self._finish_scalar() else self._break(at)

    # ---- moves

    def _string(self, text: str, at: int) -> tuple[int, str, bool]:
        if self._escape:
            escape = self._escape + text[at]
            if _ESCAPE_BEGINS.fullmatch(escape):
                self._escape = escape
                return at + 1, "", False
            self._escape = ""
            return self._escaped(escape, at)
        end = _RUN.match(text, at).end()  # type: ignore[union-attr]
        if end == len(text):
            return end, text[at:end], False
        shown, c = text[at:end], text[end]
        if c == "\\":
            self._escape = c
            return end + 1, shown, False
        return end + 1, shown + (c if c == '"' else json.dumps(c)[1:-1]), c == '"'

    def _escaped(self, escape: str, at: int) -> tuple[int, str, bool]:
        if _ESCAPE.fullmatch(escape):
            return at + 1, escape, False
        if escape == r"\'":
            return at + 1, "'", False
        if half := _HALF.match(escape):
            rest = escape[half.end() :]
            self._escape = rest[:-1]
            return at + (not rest), _REPLACEMENT, False
        return at, "\\" + escape[:-1], False

    def _hold(self, c: str, at: int) -> int:
        self._held += c
        self._num_held += 1
        return at + 1

    def _give(self, text: str) -> None:
        self._new += self._held + text
        self.first = self.first or text[0]
        self._held, self._num_held, self._comma = "", 0, False

    def _finish_scalar(self) -> bool:
        scalar = PYTHON_CONSTANTS.get(self._scalar, self._scalar)
        if not _SCALAR.fullmatch(scalar):
            return False
        self._give(scalar)
        self._scalar = ""
        self._end_value()
        return True

    def _end_bracket(self, at: int) -> int:
        self._held = "" if self._comma else self._held
        self._give(self._open[-1])
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._step = JsonValue._read_next
        self.done = not self._open

    def _break(self, at: int) -> int:
        self.broken = True
        self._close()
        return at

    def _close(self) -> None:
        self._new += ('"' if self._step is JsonValue._read_in_string else "") + "".join(reversed(self._open))
        self._open = []
