"""vLLM's constraints: `structured_outputs` and older `guided_*` fields. Pure."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.frontend.apis.shared.constraints import ANY_OBJECT, Constraint, as_text, only_one
from engine.sampling_params import GrammarSpec
from service.http.errors import bad_field

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


class StructuredFields(Protocol):
    structured_outputs: StructuredOutputs | None
    guided_json: Schema | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


class _Wish(NamedTuple):
    field: str
    value: Any
    source: Callable[[str, Any], GrammarSpec]


def structured_constraint(fields: StructuredFields) -> Constraint | None:
    """Raises ApiError(400) if there are several."""
    wishes = [
        _Wish("guided_json", fields.guided_json, _schema),
        _Wish("guided_regex", fields.guided_regex, _regex),
        _Wish("guided_choice", fields.guided_choice, _choice),
        _Wish("guided_grammar", fields.guided_grammar, _grammar),
        *(_inside(fields.structured_outputs) if fields.structured_outputs is not None else []),
    ]
    return only_one(*(Constraint(w.source(w.field, w.value), w.field) for w in wishes if w.value is not None))


def _inside(given: StructuredOutputs) -> list[_Wish]:
    for name, remedy in _UNSERVED.items():
        if getattr(given, name):
            field = f"structured_outputs.{name}"
            raise bad_field(field, f"is not supported by this server; {remedy}", code="unsupported_parameter")
    wishes = [_Wish(f"structured_outputs.{name}", getattr(given, name), source) for name, source in _SOURCES.items()]
    if given.json_object:
        wishes.append(_Wish("structured_outputs.json_object", ANY_OBJECT, _schema))
    if all(wish.value is None for wish in wishes):
        raise bad_field("structured_outputs", f"needs one of {', '.join(_SOURCES)}, json_object")
    return wishes


def _schema(field: str, value: Schema) -> GrammarSpec:
    return GrammarSpec("json_schema", as_text(value))


def _regex(field: str, value: str) -> GrammarSpec:
    return GrammarSpec("regex", value)


def _grammar(field: str, value: str) -> GrammarSpec:
    return GrammarSpec("ebnf", value)


def _tag(field: str, value: str | dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("structural_tag", as_text(value))


def _choice(field: str, choices: list[str]) -> GrammarSpec:
    if not choices or not all(choices):
        raise bad_field(field, "must be a list of texts that are not empty")
    return GrammarSpec("regex", "|".join(f"({_META.sub(_escaped, choice)})" for choice in choices))


def _escaped(match: "re.Match[str]") -> str:
    return "\\" + match[0]


_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_SOURCES: dict[str, Callable[[str, Any], GrammarSpec]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tag,
}
_UNSERVED = {
    "disable_any_whitespace": "the server's flag --constrained-json-disable-any-whitespace sets it for all requests",
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
    "whitespace_pattern": "leave it out",
}
