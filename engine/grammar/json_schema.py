"""Objects of a JSON schema hold the properties that it lists and no others, as in OpenAI's strict mode. Pure.

JSON Schema itself allows any other property where `additionalProperties` is silent; a model then fills its answer with them.
An object that lists no properties stays open, and so do parts of one object that `allOf`, `if` or a `$ref` beside
`properties` put together: each part names only some of its properties.
"""

from typing import Any

from engine.schema_references import CONDITIONS, NAMED_CONDITIONS, PARTS, Path, local, mapped

_SILENCED_BY = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMPOSED_BY = (*PARTS, *CONDITIONS, *NAMED_CONDITIONS, "$ref")


def closed(schema: Any) -> Any:
    """A copy of `schema` with closed objects. Raises BadReference, RecursionError for a schema too deep."""
    return with_additional(schema, False)


def with_additional(schema: Any, allowed: bool) -> Any:
    """A copy of `schema` whose objects say so where they were silent, and whose references are local."""
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
        """`whole`: the schema alone speaks about its value."""
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
    """Whether a schema under `key` alone speaks about its value."""
    if key in PARTS:
        return alone and (key != "allOf" or len(schema[key]) == 1)
    return key not in CONDITIONS and key not in NAMED_CONDITIONS
