"""JSON types of a function's arguments by its schema."""

from collections.abc import Iterator
from typing import Any

from engine.schema_references import BadReference, local

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
        found = [frozenset(t for t in _as_list(schema.get("type")) if isinstance(t, str))]
        found += [frozenset(_TYPES.get(type(value), "") for value in _list(schema, "enum"))]
        found += [frozenset([_TYPES.get(type(schema["const"]), "")])] if "const" in schema else []
        found += [self._types(part) for part in _list(schema, "allOf")]
        found += [self._any_of(_list(schema, key)) for key in _OPTIONS]
        found += [self._referred(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
        named = [types for types in found if types]
        return frozenset.intersection(*named) if named else ANY

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


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
