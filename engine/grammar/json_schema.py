"""Objects of a JSON schema hold the properties that it lists and no others, as in OpenAI's strict mode and xgrammar's. Pure.

JSON Schema itself allows any other property where `additionalProperties` is silent; a model then fills its answer with them.
An object that lists no properties stays open, and so do parts of one object that `allOf`, `if` or a `$ref` beside
`properties` put together: each part names only some of its properties.
"""

from typing import Any

_SILENCED_BY = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_PARTS = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
_CONDITIONS = ("if", "then", "else", "not")  # schemas for the same value
_NAMED_CONDITIONS = ("dependentSchemas",)
_INNER = ("items", "additionalProperties", "unevaluatedProperties", "contains", "propertyNames", "unevaluatedItems")
_INNER_LISTS = ("items", "prefixItems")
_INNER_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def closed(schema: Any) -> Any:
    """A copy of `schema` with closed objects. Raises RecursionError for a schema too deep."""
    return with_additional(schema, False)


def with_additional(schema: Any, allowed: bool) -> Any:
    """A copy of `schema` whose objects say so where they were silent."""
    parts: set[str] = set()  # references to parts of one object, which stay open
    while True:
        closer = _Closer(parts, allowed)
        result = closer.close(schema, "#", whole=True)
        if closer.parts == parts:
            return result
        parts = closer.parts


class _Closer:
    def __init__(self, parts: set[str], allowed: bool) -> None:
        self._allowed = allowed
        self._known = parts
        self.parts = set(parts)

    def close(self, schema: Any, pointer: str, *, whole: bool) -> Any:
        """`whole`: the schema alone speaks about its value."""
        if not isinstance(schema, dict):
            return schema
        whole = whole and pointer not in self._known
        if not whole and isinstance(schema.get("$ref"), str):
            self.parts.add(schema["$ref"])
        alone = whole and not ("properties" in schema and _is_composed(schema))
        result = {key: self._keyword(key, value, f"{pointer}/{key}", alone=alone) for key, value in schema.items()}
        if alone and isinstance(schema.get("properties"), dict) and not any(key in schema for key in _SILENCED_BY):
            result["additionalProperties"] = self._allowed
        if whole and not alone and isinstance(schema.get("$ref"), str):
            self.parts.add(schema["$ref"])
        return result

    def _keyword(self, key: str, value: Any, pointer: str, *, alone: bool) -> Any:
        if key in _PARTS and isinstance(value, list):
            whole = alone and (key != "allOf" or len(value) == 1)
            return [self.close(part, f"{pointer}/{i}", whole=whole) for i, part in enumerate(value)]
        if key in _CONDITIONS:
            return self.close(value, pointer, whole=False)
        if key in _NAMED_CONDITIONS and isinstance(value, dict):
            return {name: self.close(part, f"{pointer}/{name}", whole=False) for name, part in value.items()}
        if key in _INNER_NAMED and isinstance(value, dict):
            return {name: self.close(inner, f"{pointer}/{name}", whole=True) for name, inner in value.items()}
        if key in _INNER_LISTS and isinstance(value, list):
            return [self.close(inner, f"{pointer}/{i}", whole=True) for i, inner in enumerate(value)]
        return self.close(value, pointer, whole=True) if key in _INNER else value


def _is_composed(schema: dict[str, Any]) -> bool:
    return any(key in schema for key in (*_PARTS, *_CONDITIONS, *_NAMED_CONDITIONS, "$ref"))
