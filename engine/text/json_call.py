"""A tool call whose name stands inside its JSON object: {"name": ..., "arguments" | "parameters": {...}}. Pure."""

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
    """One JSON object, member by member. `name`: once it is a call: its name and arguments that are an object have come.

    `broken`: this is no call. One that breaks in its arguments, or behind them, is a call that has ended there.
    """

    def __init__(self) -> None:
        self.id = ""
        self.broken = False
        self.done = False
        self._name: str | None = None
        self._has_arguments = False
        self._state = _State.BEGIN
        self._key: object = None
        self._value = JsonValue()  # that is being read: a key or a member's value
        self._arguments: JsonValue | None = None
        self._text = ""  # of arguments that are not written as an object

    @property
    def name(self) -> str | None:
        return self._name if self._has_arguments else None

    def feed(self, text: str) -> int:
        """Characters taken: all, or up to the closing brace; below 0: as many of those taken before are given back."""
        at = 0
        while at < len(text) and not self.done and not self.broken:
            skips = self._state in _BETWEEN and text[at] in SPACE
            at = at + 1 if skips else _STEPS[self._state](self, text, at)
        return at

    def end(self) -> None:
        """The text has ended: arguments that have begun are closed."""
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

    # ---- steps: each reads something at `at` and returns where it ended

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
        """Nothing more belongs to it."""
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
    """Arguments that are null, or an object inside a string, as an object's JSON; "" for others."""
    inside = json.loads(text) if text.startswith('"') else text
    if inside.strip() in ("", "null"):
        return "{}"
    value = JsonValue()
    end = value.feed(inside)
    value.end()
    is_object = value.first == "{" and value.done and not inside[end:].strip()
    return value.new() if is_object else ""
