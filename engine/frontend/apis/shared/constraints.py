"""Constraints of answers: `response_format` and SGLang's fields. Pure."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import Field

from engine.grammar.compiler import closed
from engine.sampling_params import GRAMMAR_KINDS, MAX_GRAMMAR_CHARS, GrammarSpec
from engine.schema_references import BadReference, moved
from service.http.body import Body, ClosedBody, optional, required
from service.http.errors import bad_field, check_choice, missing, plain, unsupported

ANY_OBJECT = '{"type": "object"}'
MAX_CHAR_BYTES = 4  # of UTF-8
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True, slots=True)
class Constraint:
    """`field`: of the body, for errors."""

    spec: GrammarSpec
    field: str


class GrammarFields(Body):
    """SGLang's fields; a schema may be text or JSON."""

    json_schema: str | dict[str, Any] | None = optional(
        "JSON schema that the answer follows, as text or as an object (SGLang).", {"type": "object"}
    )
    regex: str | None = optional("Regular expression that the whole answer matches (SGLang).", "(yes|no)")
    ebnf: str | None = optional(
        "Grammar that the answer follows: GBNF with `root ::=`, or Lark with `start:` (SGLang).",
        'root ::= "yes" | "no"',
    )
    structural_tag: str | dict[str, Any] | None = optional(
        "Free text in which a trigger starts a constrained part, as JSON or its text (SGLang).",
        {"triggers": ["<f>"], "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}]},
    )


class JsonSchemaFormat(Body):
    schema_: dict[str, Any] | bool | None = Field(
        default=None,
        alias="schema",
        description="JSON schema of the answer.",
        examples=[{"type": "object", "properties": {"a": {"type": "integer"}}}],
    )
    name: str | None = optional("Name of the schema, for the client's own use.", "city")
    description: str | None = optional("What the format is for. Not used.", "A city and its country")
    strict: bool | None = optional(
        "True: objects hold only the properties that the schema lists. The schema is enforced either way.", True
    )


class ResponseFormat(Body):
    type: str = required("text, json_object (any object), json_schema, or structural_tag (SGLang).", "json_object")
    json_schema: JsonSchemaFormat | None = optional("The schema, for type json_schema.", {"schema": {"type": "object"}})
    structures: list[Any] | None = optional(
        "Constrained parts, for type structural_tag: objects with begin, schema and end (SGLang).",
        [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    )
    triggers: list[str] | None = optional("Texts that start a constrained part, for type structural_tag.", ["<f>"])


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
    check_choice("response_format.type", format.type, FORMATS)
    if format.type == "json_object":
        return Constraint(GrammarSpec("json_schema", ANY_OBJECT), "response_format")
    if format.type == "structural_tag":
        tag = {"structures": format.structures or [], "triggers": format.triggers or []}
        return Constraint(GrammarSpec("structural_tag", as_text(tag)), "response_format")
    if format.json_schema is None or format.json_schema.schema_ is None:
        raise missing("response_format.json_schema.schema")
    schema = format.json_schema.schema_
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


class StructuredOutputs(ClosedBody):
    json_: Schema | None = optional("JSON schema, as text or as an object.", {"type": "object"}, alias="json")
    regex: str | None = optional("Regular expression that the whole answer matches.", "[0-9]{4}")
    choice: list[str] | None = optional("Texts of which the answer is one.", ["yes", "no"])
    grammar: str | None = optional("Grammar: GBNF with `root ::=`, or Lark with `start:`.", 'root ::= "a"')
    json_object: bool | None = optional("True: the answer is any JSON object.", True)
    structural_tag: str | dict[str, Any] | None = optional(
        "Free text in which a trigger starts a constrained part, as JSON or its text.",
        {"triggers": ["<f>"], "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}]},
    )
    disable_any_whitespace: bool | None = optional(
        "Only false: the server's flag --constrained-json-disable-any-whitespace sets it for all requests.", False
    )
    disable_additional_properties: bool | None = optional(
        'Only false: write "additionalProperties": false into the schema instead.', False
    )
    whitespace_pattern: str | None = optional("Not supported; leave it out, or empty.", "")


class StructuredFields(Body):
    structured_outputs: StructuredOutputs | None = optional(
        "One constraint of the answer, beside no other (vLLM).", {"choice": ["yes", "no"]}
    )
    guided_json: Schema | None = optional(
        "JSON schema that the answer follows (vLLM's older name).", {"type": "object"}
    )
    guided_regex: str | None = optional("Regular expression that the answer matches (vLLM's older name).", "(yes|no)")
    guided_choice: list[str] | None = optional(
        "Texts of which the answer is one (vLLM's older name).", ["positive", "negative"]
    )
    guided_grammar: str | None = optional("Grammar, GBNF or Lark (vLLM's older name).", 'root ::= "yes" | "no"')


def structured_constraint(fields: StructuredFields) -> Constraint | None:
    """Raises ApiError(400) if there are several."""
    given = {name: getattr(fields, f"guided_{name}") for name in _GUIDED}
    constraints = [_constraint(f"guided_{name}", name, value) for name, value in given.items() if value is not None]
    if fields.structured_outputs is not None:
        constraints += _inside(fields.structured_outputs)
    return only_one(*constraints)


def _inside(given: StructuredOutputs) -> list[Constraint]:
    own = plain(given)
    for name, remedy in _UNSERVED.items():
        if own[name]:
            field = f"structured_outputs.{name}"
            raise unsupported(field, f"is not supported by this server; {remedy}")
    values = [(name, own[name]) for name in _KINDS if own[name] is not None]
    found = [_constraint(f"structured_outputs.{name}", name, value) for name, value in values]
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
    return "|".join(f"({_META.sub(_ESCAPED, choice)})" for choice in choices)


_META, _ESCAPED = re.compile(r"([\\.+*?()|\[\]{}^$/])"), r"\\\1"
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
