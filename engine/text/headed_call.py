"""A tool call whose name stands in a header before its JSON arguments. Pure."""

import re

MAX_HEADER_CHARS = 512


class HeadedCall:
    """`header`: matches all before the first brace, with the groups `name` and perhaps `id`. `broken`: this is no call."""

    def __init__(self, header: re.Pattern[str]) -> None:
        self.name: str | None = None
        self.id = ""
        self.broken = False
        self.done = False
        self._pattern = header
        self._header = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._new = ""

    def feed(self, text: str) -> int:
        """Characters taken: all, or up to the closing brace."""
        for i, c in enumerate(text):
            if self._depth == 0 and c != "{":
                self._header += c
                self.broken = len(self._header) > MAX_HEADER_CHARS
            else:
                self._take(c)
            if self.done or self.broken:
                return i + 1
        return len(text)

    def new_arguments(self) -> str:
        new, self._new = self._new, ""
        return new

    def _take(self, c: str) -> None:
        if self._depth == 0 and not self._read_header():
            return
        self._new += c
        if self._in_string:
            self._in_string = c != '"' or self._escaped
            self._escaped = c == "\\" and not self._escaped
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            self.done = self._depth == 0

    def _read_header(self) -> bool:
        found = self._pattern.fullmatch(self._header)
        self.broken = found is None
        if found is not None:
            groups = found.groupdict()
            self.name, self.id = groups["name"].strip(), groups.get("id") or ""
        return found is not None
