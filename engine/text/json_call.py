"""Tool calls as one value: a JSON object, JSON after a header, or a Python call. Pure."""

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from engine.text.json_value import SPACE, JsonValue, json_text
from engine.text.parts import CallScanner

# ---- Tool calls as {"name": ..., "arguments" | "parameters": {...}}.

ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCall(CallScanner):
    """`name`: set once name and an arguments object have started.

    A break in or after the arguments ends the call.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._has_arguments = False
        self._step: Callable[[JsonCall, str, int], int] = JsonCall._begin  # the next one
        self._key: object = None
        self._value = JsonValue()  # the current key or value
        self._arguments: JsonValue | None = None

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and not self.done and not self.broken:
            skips = text[at] in SPACE and self._step not in (JsonCall._read_in_key, JsonCall._read_value)
            at = at + 1 if skips else self._step(self, text, at)
        self.name = self._name if self._has_arguments else None
        return at

    def end(self) -> None:
        if self.done or self.broken:
            return
        if self._step is JsonCall._read_value and self._value is self._arguments:
            self._value.end()
            if self._value.done:
                self._end_value()
        self._stop()
        self.name = self._name if self._has_arguments else None

    def new_arguments(self) -> str:
        text = super().new_arguments()  # of arguments that are no object
        is_object = self._arguments is not None and self._arguments.first == "{"
        return self._arguments.new() if self._arguments is not None and is_object else text

    # ---- steps: each reads from `at` and returns where it stopped

    def _begin(self, text: str, at: int) -> int:
        self._step, self.broken = JsonCall._read_key, text[at] != "{"
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        if text[at] != '"':
            return self._stop(at)
        self._step, self._value = JsonCall._read_in_key, JsonValue()
        return at

    def _read_in_key(self, text: str, at: int) -> int:
        at = self._value.feed(text, at)
        if self._value.done:
            self._step, self._key = JsonCall._read_colon, json.loads(self._value.new())
        return at

    def _read_colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._stop(at)
        self._step, self._value = JsonCall._read_value, JsonValue()
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
        self._step = JsonCall._read_key
        return at + 1

    # ---- moves

    def _end_value(self) -> None:
        self._step = JsonCall._read_next
        if self._value is self._arguments:
            if self._value.first != "{":
                self._new = _as_object(self._value.new())
                self._has_arguments = bool(self._new)
                self.broken = not self._new
        elif self._key == "name" and self._name is None:
            name = json.loads(self._value.new()) if self._value.first == '"' else None
            self._name, self.broken = name, name is None

    def _close(self, at: int) -> int:
        if self._arguments is None:
            self._new, self._has_arguments = "{}", True
        self._stop()
        return at + 1

    def _stop(self, at: int = 0) -> int:
        self.done = self._name is not None and self._has_arguments
        self.broken = not self.done
        return at


def _as_object(text: str) -> str:
    inside = json.loads(text) if text.startswith('"') else text
    if inside.strip() in ("", "null"):
        return "{}"
    value = JsonValue()
    end = value.feed(inside)
    value.end()
    is_object = value.first == "{" and value.done and not inside[end:].strip()
    return value.new() if is_object else ""


# ---- Tool calls with the name in a header before JSON arguments.

MAX_HEADER_CHARS = 512
NULL = "null"  # arguments of a function without parameters


class HeadedCall(CallScanner):
    """Reads one call, a header and a JSON object, as JsonCall.

    `header`: matches all before the first brace, groups `name` and perhaps `id`.
    """

    def __init__(self, header: re.Pattern[str]) -> None:
        self._pattern = header
        self._header = ""
        self._arguments = JsonValue()

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
        return super().new_arguments() or self._arguments.new()

    def _take(self, c: str, at: int) -> int:
        if c == "{":
            self.broken = not self._read_header(self._header)
            return at
        self._header += c
        if self._header.endswith(NULL) and self._read_header(self._header.removesuffix(NULL)):
            self._new, self.done = "{}", True
        self.broken = len(self._header) > MAX_HEADER_CHARS
        return at + 1

    def _read_header(self, header: str) -> bool:
        found = self._pattern.fullmatch(header)
        if found is None:
            return False
        groups = found.groupdict()
        self.name, self.id = groups["name"].strip(), groups.get("id") or ""
        return True


# ---- Tool calls in Python syntax: NAME(key=literal, ...).

_NAME = re.compile(r"[A-Za-z_][\w.-]*\Z")
_CONSTANTS = {"true": True, "false": False, "null": None}
_ERRORS = (SyntaxError, TypeError, ValueError, RecursionError, MemoryError)
MAX_NAME_CHARS = 64


class PythonCall(CallScanner):
    """Arguments come at once."""

    def __init__(self) -> None:
        self._raw = ""
        self._name = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int:
        for i, c in enumerate(text):
            self._raw += c
            self._take(c)
            if self.done or self.broken:
                return i + 1
        return len(text)

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
    """Raises SyntaxError, ValueError, and errors of deep nesting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an unknown escape
        call = ast.parse(f"f{source}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("arguments must have names")
    return {str(keyword.arg): ast.literal_eval(_Constants().visit(keyword.value)) for keyword in call.keywords}


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
