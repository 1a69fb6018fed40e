"""Closes objects of JSON schemas, as in OpenAI's strict mode. Pure.

By default JSON Schema allows additional properties, with which a model then fills its answer.
Objects without listed properties stay open, and so do parts of one object in `allOf`, `if` or a
`$ref` with `properties`.
"""

from typing import Any

from engine.schema_references import CONDITIONS, NAMED_CONDITIONS, PARTS, Path, local, mapped

_SILENCED_BY = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMPOSED_BY = (*PARTS, *CONDITIONS, *NAMED_CONDITIONS, "$ref")


def closed(schema: Any) -> Any:
    """A copy with closed objects. Raises BadReference; RecursionError if too deep."""
    return with_additional(schema, False)


def with_additional(schema: Any, allowed: bool) -> Any:
    schema = local(schema)
    parts: set[str] = set()  # references to parts of one object, which stay open
    while True:
        closer = _Closer(parts, allowed)
        result = closer.close(schema, (), whole=True)
        if closer.parts == parts:
            return result
        parts = closer.parts


class _Closer:
    def __init__(self, parts: set[str], allowed: bool) -> None:
        self._allowed = allowed
        self._known = parts
        self.parts = set(parts)

    def close(self, schema: Any, path: Path, *, whole: bool) -> Any:
        """Close the objects of a schema. `whole`: no other schema applies to the value."""
        if not isinstance(schema, dict):
            return schema
        whole = whole and "/".join(("#", *path)) not in self._known
        alone = whole and not ("properties" in schema and any(key in schema for key in _COMPOSED_BY))
        if not alone and isinstance(schema.get("$ref"), str):
            self.parts.add(schema["$ref"])
        result = mapped(
            schema, lambda inner, below: self.close(inner, (*path, *below), whole=_speaks(below[0], schema, alone))
        )
        if alone and isinstance(schema.get("properties"), dict) and not any(key in schema for key in _SILENCED_BY):
            result["additionalProperties"] = self._allowed
        return result


def _speaks(key: str, schema: dict[str, Any], alone: bool) -> bool:
    if key in PARTS:
        return alone and (key != "allOf" or len(schema[key]) == 1)
    return key not in CONDITIONS and key not in NAMED_CONDITIONS
