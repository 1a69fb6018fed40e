"""Constraints of answers: `response_format` and SGLang's fields. Pure."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.frontend.bootstraps import BodyFields
from engine.grammar.compiler import closed
from engine.sampling_params import GRAMMAR_KINDS, MAX_GRAMMAR_CHARS, GrammarSpec
from engine.schema_references import BadReference, moved
from service.http.errors import bad_field

ANY_OBJECT = '{"type": "object"}'
MAX_CHAR_BYTES = 4  # of UTF-8
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of the output. `field`: of the body, for errors."""

    spec: GrammarSpec
    field: str


class GrammarFields(msgspec.Struct, kw_only=True):
    """SGLang's fields; a schema may be text or JSON."""

    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """Enforced even if not `strict`; strict closes objects."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The format of the output. `structures` and `triggers`: of structural_tag (SGLang)."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None


def plain_constraint(fields: GrammarFields, *, inside: str = "") -> Constraint | None:
    """The grammar field that is set. Raises ApiError(400) if several. `inside`: name prefix."""
    given = [(kind, value) for kind in GRAMMAR_KINDS if (value := getattr(fields, kind)) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise bad_field(inside + given[1][0], f"cannot be followed together with {given[0][0]}")
    kind, value = given[0]
    return Constraint(GrammarSpec(kind, as_text(value)), inside + kind)


def format_constraint(format: ResponseFormat | None) -> Constraint | None:
    if format is None or format.type == "text":
        return None
    if format.type not in FORMATS:
        raise bad_field("response_format.type", f"{format.type!r} is not one of {', '.join(FORMATS)}")
    if format.type == "json_object":
        return Constraint(GrammarSpec("json_schema", ANY_OBJECT), "response_format")
    if format.type == "structural_tag":
        tag = {"structures": format.structures or [], "triggers": format.triggers or []}
        return Constraint(GrammarSpec("structural_tag", as_text(tag)), "response_format")
    if format.json_schema is None or format.json_schema.schema is None:
        raise bad_field("response_format.json_schema.schema", "is missing")
    schema = format.json_schema.schema
    if format.json_schema.strict:
        schema = closed_schema(schema, field="response_format.json_schema.schema")
    return Constraint(GrammarSpec("json_schema", as_text(schema)), "response_format")


def closed_schema(schema: Any, *, field: str, of: str = "") -> Any:
    """The closed schema. `of`: part of the field, for errors. Raises ApiError(400)."""
    with _schema_refused(schema, field, of):
        return closed(schema)


def moved_schema(schema: Any, *, namespace: str, field: str, of: str) -> tuple[Any, dict[str, Any]]:
    """The schema for use below another root, and its `$defs`. Raises ApiError(400)."""
    with _schema_refused(schema, field, of):
        return moved(schema, namespace=namespace)


@contextlib.contextmanager
def _schema_refused(schema: Any, field: str, of: str) -> Iterator[None]:
    """Reject an overlong schema before walking it."""
    try:
        if len(msgspec.json.encode(schema)) > MAX_CHAR_BYTES * MAX_GRAMMAR_CHARS:
            raise bad_field(field, f"{of}must have at most {MAX_GRAMMAR_CHARS} characters")
        yield
    except BadReference as error:
        raise bad_field(field, f"{of}{error}") from None
    except RecursionError:
        raise bad_field(field, f"{of}is nested too deeply") from None


def only_one(*constraints: Constraint | None) -> Constraint | None:
    given = [c for c in constraints if c is not None]
    if len(given) > 1:
        raise bad_field(given[1].field, f"cannot be followed together with {given[0].field}")
    return given[0] if given else None


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- vLLM's constraints: `structured_outputs` and older `guided_*` fields. Pure.

Schema = str | dict[str, Any] | bool


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The last three are unsupported."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class StructuredFields(BodyFields):
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def structured_constraint(fields: StructuredFields) -> Constraint | None:
    """Raises ApiError(400) if there are several."""
    given = {name: getattr(fields, f"guided_{name}") for name in _GUIDED}
    constraints = [_constraint(f"guided_{name}", name, value) for name, value in given.items() if value is not None]
    if fields.structured_outputs is not None:
        constraints += _inside(fields.structured_outputs)
    return only_one(*constraints)


def _inside(given: StructuredOutputs) -> list[Constraint]:
    for name, remedy in _UNSERVED.items():
        if getattr(given, name):
            field = f"structured_outputs.{name}"
            raise bad_field(field, f"is not supported by this server; {remedy}", code="unsupported_parameter")
    values = {name: getattr(given, name) for name in _KINDS}
    found = [_constraint(f"structured_outputs.{n}", n, value) for n, value in values.items() if value is not None]
    if given.json_object:
        found.append(_constraint("structured_outputs.json_object", "json", ANY_OBJECT))
    if not found:
        raise bad_field("structured_outputs", f"needs one of {', '.join(_KINDS)}, json_object")
    return found


def _constraint(field: str, name: str, value: Any) -> Constraint:
    kind = _KINDS[name]
    return Constraint(GrammarSpec(kind, _choice(field, value) if name == "choice" else as_text(value)), field)


def _choice(field: str, choices: list[str]) -> str:
    if not choices or not all(choices):
        raise bad_field(field, "must be a list of texts that are not empty")
    return "|".join(f"({_META.sub(_escaped, choice)})" for choice in choices)


def _escaped(match: "re.Match[str]") -> str:
    return "\\" + match[0]


_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
# vLLM's names -> kinds of grammars
_KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_GUIDED = ("json", "regex", "choice", "grammar")
_UNSERVED = {
    "disable_any_whitespace": "the server's flag --constrained-json-disable-any-whitespace sets it for all requests",
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
    "whitespace_pattern": "leave it out",
}
