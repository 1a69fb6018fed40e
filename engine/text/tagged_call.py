"""Tool calls with a tag per argument, JSON by the schema.

glm45        NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
qwen3_coder  <function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.schema_references import BadReference, local
from engine.text.json_value import json_text
from engine.text.parts import CallScanner, overlap

# ---- JSON types of a function's arguments by its schema.

Types = frozenset[str]
ANY: Types = frozenset()
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_OPTIONS = ("anyOf", "oneOf")


class ArgumentTypes:
    """Types of a function's arguments, by its schema.

    `parameters`: a schema, unchecked. Unresolvable references are ignored.
    """

    def __init__(self, parameters: Any) -> None:
        self._known: dict[str, Types] = {}  # by reference
        try:
            self._root = local(parameters)
        except (BadReference, RecursionError):
            self._root = parameters

    def of(self, key: str) -> Types:
        """Types of one argument; empty for any."""
        parts = [part for part in self._parts(self._root, set()) if isinstance(part.get("properties"), dict)]
        named = [part["properties"][key] for part in parts if key in part["properties"]]
        return self._any_of(named or [part["additionalProperties"] for part in parts if "additionalProperties" in part])

    def _parts(self, schema: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
        if not isinstance(schema, dict):
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield from self._parts(self._target(reference), seen)
        for key in ("allOf", *_OPTIONS):
            for part in _list(schema, key):
                yield from self._parts(part, seen)

    def _types(self, schema: Any) -> Types:
        if not isinstance(schema, dict):
            return ANY
        named = schema.get("type")
        found = [frozenset(t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str))]
        found += [frozenset(_TYPES.get(type(value), "") for value in _list(schema, "enum"))]
        found += [frozenset([_TYPES.get(type(schema["const"]), "")])] if "const" in schema else []
        found += [self._types(part) for part in _list(schema, "allOf")]
        found += [self._any_of(_list(schema, key)) for key in _OPTIONS]
        found += [self._referred(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
        known = [types for types in found if types]
        return frozenset.intersection(*known) if known else ANY

    def _any_of(self, options: list[Any]) -> Types:
        types = [self._types(option) for option in options]
        return ANY.union(*types) if all(types) else ANY

    def _referred(self, reference: str) -> Types:
        if reference not in self._known:
            self._known[reference] = ANY  # while resolved, because it may contain itself
            self._known[reference] = self._types(self._target(reference))
        return self._known[reference]

    def _target(self, reference: str) -> Any:
        if reference == "#":
            return self._root
        definitions = self._root.get("$defs")
        return definitions.get(reference.removeprefix("#/$defs/")) if isinstance(definitions, dict) else None


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


Schemas = Mapping[str, dict[str, Any] | None]
_LONGEST = 16  # characters of the longest marker
MAX_NAME_CHARS = 256
MAX_KEY_CHARS = 512
MAX_TAGS_CHARS = 128  # around a key, with space between
_PYTHON = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class Tags:
    """`begin`: before the name; `name_ends`: after it, only the first is consumed. `key`: a key
    with tags. `value_ends`: the first is consumed. `lines`: tags include a line break at each end
    of a value.
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
    key=re.compile(rf"<arg_key>(.{{0,{MAX_KEY_CHARS}}}?)</arg_key>\s{{0,64}}<arg_value>", re.DOTALL),
    key_begins="<arg_key>",
    value_ends=("</arg_value>",),
    end="</tool_call>",
    lines=False,
)
QWEN_TAGS = Tags(
    begin="<function=",
    name_ends=(">",),
    key=re.compile(rf"<parameter=(.{{0,{MAX_KEY_CHARS}}}?)>", re.DOTALL),
    key_begins="<parameter=",
    value_ends=("</parameter>", "<parameter=", "</function>"),
    end="</function>",
    lines=True,
)


class TaggedCall(CallScanner):
    """Strings stream, other arguments come whole.

    `name`: set once an argument starts or the call ends. A later format error ends the call.
    """

    def __init__(self, tags: Tags, schemas: Schemas) -> None:
        self._tags = tags
        self._schemas = schemas
        self._name: str | None = None  # as read
        self._types: ArgumentTypes | None = None
        self._rest = ""  # not read yet
        self._key: str | None = None  # of the current value
        self._is_text = False  # the value is a string, streamed
        self._at_start = True  # of the value
        self._searched = 0  # characters of the rest without an end of the value
        self._num_arguments = 0

    def feed(self, text: str) -> int:
        self._rest += text
        while not (self.done or self.broken) and self._step():
            pass
        return len(text) - len(self._rest) if self.done or self.broken else len(text)

    def end(self) -> None:
        """Keep an incomplete string, other values if complete."""
        if self.name is None or self.done:
            return
        value = self._rest[: len(self._rest) - self._held()]
        if self._key is not None and (_is_text(self._types_of(self._key)) or _from_json(value) is not None):
            self._end_value(self._key, value)
        self._rest = ""
        self._end(None)

    def _step(self) -> bool:
        if self._name is None:
            return self._read_name()
        return self._read_between(self._name) if self._key is None else self._read_value(self._key)

    def _read_name(self) -> bool:
        begin, ends = self._tags.begin, self._tags.name_ends
        if not self._rest.startswith(begin):
            self.broken = not begin.startswith(self._rest)
            return False
        found = _first(self._rest[: MAX_NAME_CHARS + _LONGEST], ends, start=len(begin))
        if found is None:
            self.broken = len(self._rest) > MAX_NAME_CHARS + _LONGEST
            return False
        at, end = found
        self._name = self._rest[len(begin) : at].strip()
        self._rest = self._rest[at + len(end) * (end == ends[0]) :]
        return True

    def _read_between(self, name: str) -> bool:
        rest = self._rest = self._rest.lstrip()
        if rest.startswith(self._tags.end):
            self.name = name
            self._end(rest)
            return False
        found = self._tags.key.match(rest)
        if found is not None:
            self.name, self._rest = name, rest[found.end() :]
            self._open(found[1].strip())
            return True
        begins = self._tags.key_begins
        may_come = rest.startswith(begins) and len(rest) <= MAX_KEY_CHARS + MAX_TAGS_CHARS
        if not (may_come or begins.startswith(rest) or self._tags.end.startswith(rest)):
            self._end(None)  # format error: the call ends here, if it is one
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
        self._end_value(key, value)
        return True

    def _open(self, key: str) -> None:
        self._key, self._at_start, self._searched = key, True, 0
        self._is_text = self._types_of(key) == {"string"}
        if self._is_text:
            self._give_key(key)
            self._new += '"'

    def _give_key(self, key: str) -> None:
        self._new += (", " if self._num_arguments else "{") + json.dumps(key) + ": "
        self._num_arguments += 1

    def _end_value(self, key: str, value: str) -> None:
        text = self._without_breaks(value, ends=True)
        if self._is_text:
            self._new += _escaped(text) + '"'
        else:
            self._give_key(key)
            self._new += json_text(value_of(text, self._types_of(key)))
        self._key = None

    def _give_text(self) -> None:
        text = self._rest[: len(self._rest) - self._held()]
        text = text[:-1] if self._tags.lines and text.endswith("\n") else text
        if text:
            self._rest, self._searched = self._rest[len(text) :], 0
            self._new += _escaped(self._without_breaks(text, ends=False))

    def _held(self) -> int:
        return max(overlap(self._rest, marker) for marker in self._tags.value_ends)

    def _without_breaks(self, text: str, *, ends: bool) -> str:
        if not self._tags.lines:
            return text
        text = text.removeprefix("\n") if self._at_start else text
        self._at_start = False
        return text.removesuffix("\n") if ends else text

    def _types_of(self, key: str) -> Types:
        if self._types is None:
            self._types = ArgumentTypes(self._schemas.get(self.name or ""))
        return self._types.of(key)

    def _end(self, rest: str | None) -> None:
        self.done = self.name is not None
        self.broken = not self.done
        self._new += "}" if self._num_arguments else "{}"
        if rest is not None:
            self._rest = rest[len(self._tags.end) :]


def value_of(text: str, types: Types) -> Any:
    """Parse a string if the type requires it, else JSON or Python constants, else a string."""
    if types == {"string"} or (_is_text(types) and text != "null"):
        return text
    value = _from_json(text)
    return text if value is None else value[0]


def _is_text(types: Types) -> bool:
    return types - {"null"} == {"string"}


def _from_json(text: str) -> tuple[Any] | None:
    try:
        value = json.loads(text)
        json_text(value)
    except (ValueError, RecursionError):
        text = text.strip()
        return (_PYTHON[text],) if text in _PYTHON else None
    return (value,)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _first(text: str, markers: tuple[str, ...], *, start: int = 0) -> tuple[int, str] | None:
    """First marker and position, None while an earlier one may start."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker
