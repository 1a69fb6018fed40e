"""A tool call whose arguments stand in tags, one pair for each, as text; the schema says which are JSON. Pure.

glm45        NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
qwen3_coder  <function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.text.parts import overlap

Schemas = Mapping[str, dict[str, Any] | None]
_LONGEST = 16  # characters of the longest marker
_PYTHON = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class Tags:
    """`begin`: before the name; `name_ends`: what may follow it (only the first one is consumed). `key`: a key with its tags.

    `value_ends`: what may end a value, of which the first is consumed. `end`: of the call. `lines`: a line break
    at each end of a value belongs to the tags.
    """

    begin: str
    name_ends: tuple[str, ...]
    key: re.Pattern[str]
    key_begins: str
    value_ends: tuple[str, ...]
    end: str
    lines: bool


GLM_TAGS = Tags(
    begin="",
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    key=re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    key_begins="<arg_key>",
    value_ends=("</arg_value>",),
    end="</tool_call>",
    lines=False,
)
QWEN_TAGS = Tags(
    begin="<function=",
    name_ends=(">",),
    key=re.compile(r"<parameter=(.*?)>", re.DOTALL),
    key_begins="<parameter=",
    value_ends=("</parameter>", "<parameter=", "</function>"),
    end="</function>",
    lines=True,
)


class TaggedCall:
    """`schemas`: parameters of the functions. Texts come out as they come, other arguments whole. `broken`: this is no call."""

    def __init__(self, tags: Tags, schemas: Schemas) -> None:
        self.name: str | None = None
        self.id = ""
        self.broken = False
        self.done = False
        self._tags = tags
        self._schemas = schemas
        self._rest = ""  # not read yet
        self._key: str | None = None  # of the value that is being read
        self._is_text = False  # the value is a text, given out as it comes
        self._at_start = True  # of the value
        self._searched = 0  # characters of the rest that hold no end of the value
        self._num_arguments = 0
        self._new = ""

    def feed(self, text: str) -> int:
        """Characters taken: all, or up to the end of the call; below 0: as many of the texts before are given back too."""
        self._rest += text
        while not (self.done or self.broken) and self._step():
            pass
        return len(text) - len(self._rest) if self.done or self.broken else len(text)

    def new_arguments(self) -> str:
        new, self._new = self._new, ""
        return new

    def _step(self) -> bool:
        """Return whether to go on."""
        if self.name is None:
            return self._read_name()
        return self._read_between() if self._key is None else self._read_value(self._key)

    def _read_name(self) -> bool:
        begin, ends = self._tags.begin, self._tags.name_ends
        if not self._rest.startswith(begin):
            self.broken = not begin.startswith(self._rest)
            return False
        found = _first(self._rest, ends, start=len(begin))
        if found is None:
            return False
        at, end = found
        self.name = self._rest[len(begin) : at].strip()
        self._rest = self._rest[at + len(end) * (end == ends[0]) :]
        return True

    def _read_between(self) -> bool:
        rest = self._rest.lstrip()
        if rest.startswith(self._tags.end):
            self._end(rest)
            return False
        found = self._tags.key.match(rest)
        if found is not None:
            self._rest = rest[found.end() :]
            self._open(found[1].strip())
            return True
        begins = self._tags.key_begins
        if not (rest.startswith(begins) or begins.startswith(rest) or self._tags.end.startswith(rest)):
            self._end(None)  # the model has left its format: what it said so far is the call
        return False

    def _read_value(self, key: str) -> bool:
        found = _first(self._rest, self._tags.value_ends, start=self._searched)
        if found is None:
            self._searched = max(0, len(self._rest) - _LONGEST)
            if self._is_text:
                self._give_text()
            return False
        at, end = found
        value, self._rest = self._rest[:at], self._rest[at + len(end) * (end == self._tags.value_ends[0]) :]
        self._searched = 0
        if self._is_text:
            self._new += _escaped(self._without_breaks(value, ends=True)) + '"'
        else:
            self._new += json.dumps(
                value_of(self._without_breaks(value, ends=True), self._schema(key)), ensure_ascii=False
            )
        self._key = None
        return True

    def _open(self, key: str) -> None:
        """A key came, and its value begins."""
        self._key, self._at_start = key, True
        self._is_text = _types_of(self._schema(key)) == {"string"}
        self._new += (", " if self._num_arguments else "{") + json.dumps(key) + ": " + '"' * self._is_text
        self._num_arguments += 1

    def _give_text(self) -> None:
        """Give the text that surely belongs to the value: no possible begin of a marker, no line break that may end it."""
        held = max(overlap(self._rest, marker) for marker in self._tags.value_ends)
        text = self._rest[: len(self._rest) - held]
        text = text[:-1] if self._tags.lines and text.endswith("\n") else text
        if text:
            self._rest, self._searched = self._rest[len(text) :], 0
            self._new += _escaped(self._without_breaks(text, ends=False))

    def _without_breaks(self, text: str, *, ends: bool) -> str:
        if not self._tags.lines:
            return text
        text = text.removeprefix("\n") if self._at_start else text
        self._at_start = False
        return text.removesuffix("\n") if ends else text

    def _schema(self, key: str) -> Any:
        parameters = self._schemas.get(self.name or "") or {}
        return (parameters.get("properties") or {}).get(key) if isinstance(parameters, dict) else None

    def _end(self, rest: str | None) -> None:
        self.done = True
        self._new += "}" if self._num_arguments else "{}"
        if rest is not None:
            self._rest = rest[len(self._tags.end) :]


def value_of(text: str, schema: Any) -> Any:
    """A value from its text: a string where the schema wants one, else JSON (or Python's constants), else a string."""
    types = _types_of(schema)
    if types == {"string"} or (types == {"string", "null"} and text != "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _PYTHON.get(text.strip(), text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types_of(schema: Any) -> set[str]:
    """Types that the schema names at its top; empty: it names none."""
    if not isinstance(schema, dict):
        return set()
    type = schema.get("type")
    if isinstance(type, str):
        return {type}
    if isinstance(type, list):
        return {t for t in type if isinstance(t, str)}
    if isinstance(schema.get("enum"), list):
        return {"string" if isinstance(v, str) else "other" for v in schema["enum"]}
    options = schema.get("anyOf") or schema.get("oneOf") or []
    return {t for option in options for t in _types_of(option)} if isinstance(options, list) else set()


def _first(text: str, markers: tuple[str, ...], *, start: int = 0) -> tuple[int, str] | None:
    """The first marker and where it stands; None while one may still begin before it."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker
