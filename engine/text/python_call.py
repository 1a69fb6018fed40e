"""Tool calls in Python syntax: NAME(key=literal, ...)."""

import ast
import re
import warnings
from typing import Any

from engine.text.json_value import json_text

_NAME = re.compile(r"[A-Za-z_][\w.-]*\Z")
_CONSTANTS = {"true": True, "false": False, "null": None}
_ERRORS = (SyntaxError, TypeError, ValueError, RecursionError, MemoryError)
MAX_NAME_CHARS = 64


class PythonCall:
    """Parser of one call; arguments come at once. `broken`: no call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.id = ""
        self.broken = False
        self.done = False
        self._raw = ""
        self._name = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._new = ""

    def feed(self, text: str) -> int:
        for i, c in enumerate(text):
            self._raw += c
            self._take(c)
            if self.done or self.broken:
                return i + 1
        return len(text)

    def end(self) -> None:
        """Drop incomplete arguments."""

    def new_arguments(self) -> str:
        new, self._new = self._new, ""
        return new

    def _take(self, c: str) -> None:
        if self._quote:
            if c == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = c == "\\" and not self._escaped
        elif c in "\"'" and self._depth:
            self._quote = c
        elif c in "([{":
            self._open(c)
        elif c in ")]}":
            self._depth -= 1
            if self._depth == 0:
                self._end()
            self.broken = self.broken or self._depth < 0
        elif self._depth == 0:
            self.broken = len(self._raw) > MAX_NAME_CHARS or _NAME.match(self._raw) is None

    def _open(self, c: str) -> None:
        if self._depth == 0:
            self.broken = c != "(" or len(self._raw) == 1
            self._name = self._raw[:-1]
        self._depth += 1

    def _end(self) -> None:
        try:
            self._new = json_text(_arguments(self._raw[len(self._name) :]))
        except _ERRORS:
            self.broken = True
            return
        self.name, self.done = self._name, True


def _arguments(source: str) -> dict[str, Any]:
    """Parse `(key=value, ...)`. Raises SyntaxError, ValueError, and errors of deep nesting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an unknown escape
        call = ast.parse(f"f{source}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("arguments must have names")
    return {str(keyword.arg): ast.literal_eval(_Constants().visit(keyword.value)) for keyword in call.keywords}


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
