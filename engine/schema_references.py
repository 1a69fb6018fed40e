"""References (`$ref`) of a JSON schema, made local or moved with it. Pure.

llguidance cannot follow references with encoded letters; here all become "#" or "#/$defs/NAME" with
a plain name. Source: JSON Schema 2020-12, core, 8.2.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urljoin

import msgspec

Path = tuple[str, ...]  # keys and indexes from the root
SCHEMAS = ("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties")
CONDITIONS = ("if", "then", "else", "not")  # schemas for the same value
PARTS = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
NAMED_CONDITIONS = ("dependentSchemas", "dependencies")
_SINGLE = (*SCHEMAS, *CONDITIONS, "propertyNames", "contentSchema")
_LISTS = (*PARTS, "items", "prefixItems")
_DEFINITIONS = ("$defs", "definitions")
_NAMED = (*NAMED_CONDITIONS, *_DEFINITIONS, "properties", "patternProperties")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_PLACES = ("$id", *_ANCHORS, *_DEFINITIONS)  # needed only by references
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
_MARKS = re.compile(rb'"\$(?:ref|dynamicRef|recursiveRef|id)"')  # marks of possible references
_NOT_PLAIN = re.compile(r"[^\w.-]", re.ASCII)
MAX_SHOWN_CHARS = 80


class BadReference(ValueError):
    """An unresolvable or external reference; one-line message."""


def local(schema: Any) -> Any:
    """The schema with local references. Raises BadReference; RecursionError if too deep."""
    references = _References(schema) if _may_refer(schema) else None
    if references is None or not references.names:
        return schema
    whole = references.body(())
    definitions = {name: references.body(path) for path, name in references.names.items() if path}
    return {**whole, "$defs": definitions} if definitions else whole


def moved(schema: Any, *, namespace: str) -> tuple[Any, dict[str, Any]]:
    """The schema for use below another root, and the `$defs` to add there.

    All names start with `namespace`. Raises BadReference; RecursionError if too deep.
    """
    if not _may_refer(schema):
        return schema, {}
    references = _References(schema, namespace)
    definitions = {name: references.body(path) for path, name in references.names.items()}
    return references.placed((), schema), definitions


def _may_refer(schema: Any) -> bool:
    return _MARKS.search(msgspec.json.encode(schema)) is not None


def mapped(schema: dict[str, Any], change: Callable[[Any, Path], Any]) -> dict[str, Any]:
    """A copy with direct subschemas changed; `change` gets relative paths, too."""
    result = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            result[key] = {name: change(inner, (key, name)) for name, inner in value.items()}
        elif key in _LISTS and isinstance(value, list):
            result[key] = [change(inner, (key, str(i))) for i, inner in enumerate(value)]
        elif key in _SINGLE:
            result[key] = change(value, (key,))
    return result


def _subschemas(schema: dict[str, Any]) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    mapped(schema, lambda inner, path: found.append((path, inner)))
    return found


class _References:
    def __init__(self, root: Any, namespace: str = "") -> None:
        self.names: dict[Path, str] = {}
        self._root = root
        self._namespace = namespace
        self._resources: dict[str, Path] = {"": ()}  # by `$id`
        self._bases: dict[Path, str] = {(): ""}  # the resource that starts at a path
        self._anchors: dict[tuple[str, str], Path] = {}
        self._num_alike: Counter[str] = Counter()
        self._note(root, (), "")
        self._follow()

    def body(self, path: Path) -> Any:
        schema = self._at(path)
        if not isinstance(schema, dict):
            return schema
        kept = {key: value for key, value in schema.items() if key not in _PLACES}
        result = mapped(kept, lambda inner, below: self.placed((*path, *below), inner))
        if isinstance(schema.get("$ref"), str):
            result["$ref"] = self._pointer(self._target(schema["$ref"], path))
        return result

    def placed(self, path: Path, schema: Any) -> Any:
        return {"$ref": self._pointer(path)} if path in self.names else self.body(path)

    def _pointer(self, path: Path) -> str:
        name = self.names[path]
        return f"#/$defs/{name}" if name else "#"

    def _note(self, schema: Any, path: Path, base: str) -> None:
        if not isinstance(schema, dict):
            return
        id = schema.get("$id")
        anchors = [schema.get(key) for key in _ANCHORS]
        if isinstance(id, str) and not id.startswith("#"):
            base = _joined(base, id, "$id").removesuffix("#")
            self._resources.setdefault(base, path)
            self._bases[path] = base
        elif isinstance(id, str):
            anchors.append(id[1:])  # an anchor in drafts 6 and 7
        self._anchors |= {(base, anchor): path for anchor in anchors if isinstance(anchor, str)}
        for below, inner in _subschemas(schema):
            self._note(inner, (*path, *below), base)

    def _follow(self) -> None:
        seen: set[Path] = set()
        waiting: list[Path] = [()]
        while waiting:
            path = waiting.pop()
            schema = self._at(path)
            if path in seen or not isinstance(schema, dict):
                continue
            seen.add(path)
            if dynamic := next((key for key in _DYNAMIC if key in schema), None):
                raise BadReference(f"{dynamic} is not supported; write $ref")
            if isinstance(schema.get("$ref"), str):
                waiting.append(self._target(schema["$ref"], path))
                self._name(waiting[-1])
            waiting += [(*path, *below) for below, _ in reversed(_subschemas(schema)) if below[0] not in _DEFINITIONS]

    def _name(self, path: Path) -> None:
        if path in self.names:
            return
        if not path:
            self.names[path] = self._namespace
            return
        plain = _NOT_PLAIN.sub("_", path[-1]) or "_"
        alike, self._num_alike[plain] = self._num_alike[plain], self._num_alike[plain] + 1
        prefix = f"{self._namespace}:" if self._namespace else ""
        self.names[path] = f"{prefix}{plain}" + (f":{alike}" if alike else "")

    def _target(self, reference: str, path: Path) -> Path:
        uri, _, fragment = reference.partition("#")
        base = next(self._bases[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._bases)
        uri = _joined(base, uri, "$ref") if uri else base
        if uri not in self._resources:
            raise BadReference(f"{_shown(reference)}: only references into the schema itself can be followed")
        for text in (unquote(fragment), fragment):
            found = self._place(self._resources[uri], text) if text[:1] in ("", "/") else self._anchors.get((uri, text))
            if found is not None and isinstance(self._at(found), dict | bool):
                return found
        raise BadReference(f"{_shown(reference)}: no schema stands there")

    def _place(self, path: Path, pointer: str) -> Path | None:
        keys = (key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:])
        found = (*path, *keys)
        try:
            self._at(found)
        except (LookupError, TypeError, ValueError):
            return None
        return found

    def _at(self, path: Path) -> Any:
        value = self._root
        for key in path:
            value = value[_index(key)] if isinstance(value, list) else value[key]
        return value


def _joined(base: str, uri: str, key: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError as error:
        raise BadReference(f"{_shown(uri, key)}: is no URI ({error})") from None


def _index(key: str) -> int:
    if not key.isdecimal():
        raise ValueError(f"{key!r} is no index")
    return int(key)


def _shown(reference: str, key: str = "$ref") -> str:
    return f"{key} {reference[:MAX_SHOWN_CHARS]!r}"
