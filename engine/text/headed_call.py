"""A tool call whose name stands in a header before its JSON arguments. Pure."""

import re

from engine.text.json_value import JsonValue

MAX_HEADER_CHARS = 512
NULL = "null"  # arguments of a function that takes none


class HeadedCall:
    """`header`: matches all before the first brace, with the groups `name` and perhaps `id`. `broken`: this is no call.

    A call that breaks in its arguments has ended there.
    """

    def __init__(self, header: re.Pattern[str]) -> None:
        self.name: str | None = None
        self.id = ""
        self.broken = False
        self.done = False
        self._pattern = header
        self._header = ""
        self._arguments = JsonValue()
        self._text = ""  # of arguments that are not written as an object

    def feed(self, text: str) -> int:
        """Characters taken: all, or up to the closing brace; below 0: as many of those taken before are given back."""
        at = 0
        while at < len(text) and self.name is None and not self.broken:
            at = self._take(text[at], at)
        if self.name is None or self.done:
            return at
        at = self._arguments.feed(text, at)
        self.done = self._arguments.done or self._arguments.broken
        return at

    def end(self) -> None:
        """The text has ended: arguments that have begun are closed."""
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
