"""Tool calls with the name in a header before JSON arguments."""

import re

from engine.text.json_value import JsonValue

MAX_HEADER_CHARS = 512
NULL = "null"  # arguments of a function without parameters


class HeadedCall:
    """Reads one call, a header and a JSON object.

    `header`: matches all before the first brace, groups `name` and perhaps `id`. Broken arguments
    end the call.
    """

    def __init__(self, header: re.Pattern[str]) -> None:
        self.name: str | None = None
        self.id = ""
        self.broken = False
        self.done = False
        self._pattern = header
        self._header = ""
        self._arguments = JsonValue()
        self._text = ""  # arguments that are no object

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and self.name is None and not self.broken:
            at = self._take(text[at], at)
        if self.name is None or self.done:
            return at
        at = self._arguments.feed(text, at)
        self.done = self._arguments.done or self._arguments.broken
        return at

    def end(self) -> None:
        if self.name is not None and not self.done:
            self._arguments.end()
            self.done = True

    def new_arguments(self) -> str:
        text, self._text = self._text, ""
        return text or self._arguments.new()

    def _take(self, c: str, at: int) -> int:
        if c == "{":
            self.broken = not self._read_header(self._header)
            return at
        self._header += c
        if self._header.endswith(NULL) and self._read_header(self._header.removesuffix(NULL)):
            self._text, self.done = "{}", True
        self.broken = len(self._header) > MAX_HEADER_CHARS
        return at + 1

    def _read_header(self, header: str) -> bool:
        found = self._pattern.fullmatch(header)
        if found is None:
            return False
        groups = found.groupdict()
        self.name, self.id = groups["name"].strip(), groups.get("id") or ""
        return True
