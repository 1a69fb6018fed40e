"""Tool calls as {"name": ..., "arguments" | "parameters": {...}}."""

import json
from collections.abc import Callable
from enum import Enum

from engine.text.json_value import SPACE, JsonValue

ARGUMENT_KEYS = ("arguments", "parameters")


class _State(Enum):
    BEGIN = "begin"
    KEY = "key"
    IN_KEY = "in key"
    COLON = "colon"
    VALUE = "value"
    NEXT = "next"


_BETWEEN = (_State.BEGIN, _State.KEY, _State.COLON, _State.NEXT)


class JsonCall:
    """Parser of one call. `name`: set once name and an arguments object have started.

    `broken`: no call. A break in or after the arguments ends the call.
    """

    def __init__(self) -> None:
        self.id = ""
        self.broken = False
        self.done = False
        self._name: str | None = None
        self._has_arguments = False
        self._state = _State.BEGIN
        self._key: object = None
        self._value = JsonValue()  # the current key or value
        self._arguments: JsonValue | None = None
        self._text = ""  # arguments that are no object

    @property
    def name(self) -> str | None:
        return self._name if self._has_arguments else None

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and not self.done and not self.broken:
            skips = self._state in _BETWEEN and text[at] in SPACE
            at = at + 1 if skips else _STEPS[self._state](self, text, at)
        return at

    def end(self) -> None:
        if self.done or self.broken:
            return
        if self._state is _State.VALUE and self._value is self._arguments:
            self._value.end()
            if self._value.done:
                self._end_value()
        self._stop()

    def new_arguments(self) -> str:
        text, self._text = self._text, ""
        is_object = self._arguments is not None and self._arguments.first == "{"
        return self._arguments.new() if self._arguments is not None and is_object else text

    # ---- steps: each reads from `at` and returns where it stopped

    def _begin(self, text: str, at: int) -> int:
        self._state, self.broken = _State.KEY, text[at] != "{"
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        if text[at] != '"':
            return self._stop(at)
        self._state, self._value = _State.IN_KEY, JsonValue()
        return at

    def _read_in_key(self, text: str, at: int) -> int:
        at = self._value.feed(text, at)
        if self._value.done:
            self._state, self._key = _State.COLON, json.loads(self._value.new())
        return at

    def _read_colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._stop(at)
        self._state, self._value = _State.VALUE, JsonValue()
        if self._key in ARGUMENT_KEYS and self._arguments is None:
            self._arguments = self._value
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        value = self._value
        at = value.feed(text, at)
        if value is self._arguments and value.first == "{":
            self._has_arguments = True
        if value.broken:
            return self._stop(at)
        if value.done:
            self._end_value()
        return at

    def _read_next(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        if text[at] != ",":
            return self._stop(at)
        self._state = _State.KEY
        return at + 1

    # ---- moves

    def _end_value(self) -> None:
        self._state = _State.NEXT
        if self._value is self._arguments:
            if self._value.first != "{":
                self._text = _as_object(self._value.new())
                self._has_arguments = bool(self._text)
                self.broken = not self._text
        elif self._key == "name" and self._name is None:
            name = json.loads(self._value.new()) if self._value.first == '"' else None
            self._name, self.broken = name, name is None

    def _close(self, at: int) -> int:
        if self._arguments is None:
            self._text, self._has_arguments = "{}", True
        self._stop()
        return at + 1

    def _stop(self, at: int = 0) -> int:
        self.done = self.name is not None
        self.broken = not self.done
        return at


_STEPS: dict[_State, Callable[[JsonCall, str, int], int]] = {
    _State.BEGIN: JsonCall._begin,
    _State.KEY: JsonCall._read_key,
    _State.IN_KEY: JsonCall._read_in_key,
    _State.COLON: JsonCall._read_colon,
    _State.VALUE: JsonCall._read_value,
    _State.NEXT: JsonCall._read_next,
}


def _as_object(text: str) -> str:
    inside = json.loads(text) if text.startswith('"') else text
    if inside.strip() in ("", "null"):
        return "{}"
    value = JsonValue()
    end = value.feed(inside)
    value.end()
    is_object = value.first == "{" and value.done and not inside[end:].strip()
    return value.new() if is_object else ""
