"""A tool call whose name stands inside its JSON object: {"name": ..., "arguments" | "parameters": {...}}. Pure."""

import json

ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCall:
    """One JSON object, character by character: strings, depth, keys and values. `broken`: this is no call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.id = ""
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


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
