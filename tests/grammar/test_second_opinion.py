"""JSON schemas by our compiler and by xgrammar: the same language where both hold a schema, a refusal where ours cannot."""

import json
from typing import Any

import pytest

from engine.sampling_params import GrammarInvalid, GrammarSpec
from tests.grammar.compilers import COMPILERS, accepts, check_texts, compiler_of


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


A: dict[str, Any] = {"const": 1}
B: dict[str, Any] = {"const": 2}
# name: (schema, texts in it, texts out of it)
SAME: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
    "pattern": ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"b"', '""']),
    "date": ({"type": "string", "format": "date"}, ['"2024-01-02"'], ['"2024-01"', '"x"']),
    "uuid": ({"format": "uuid", "type": "string"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    "e-mail": ({"format": "email", "type": "string"}, ['"a@b.co"'], ['"a b"']),
    "bounds": ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "3.5"]),
    "open bounds": ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12}, ["4", "11"], ["3", "12"]),
    "bounds of a number": ({"type": "number", "minimum": 0.5, "maximum": 1.5}, ["0.5", "1.2"], ["0.1", "2"]),
    "multiples": ({"type": "integer", "multipleOf": 5}, ["10", "0"], ["11"]),
    "items": ({"type": "array", "items": A, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 1]"], ["[]", "[2]", "[1, 1, 1]"]),
    "places": ({"type": "array", "prefixItems": [A, B], "items": False}, ["[1, 2]"], ["[2]", "[1, 2, 3]"]),
    "properties": ({"properties": {"a": A, "b": B}, "type": "object"}, ['{"a": 1, "b": 2}', "{}"], ['{"a": 2}']),
    "required": ({"properties": {"a": A, "b": B}, "required": ["b"], "type": "object"}, ['{"b": 2}'], ['{"a": 1}', "{}"]),
    "count": ({"additionalProperties": A, "minProperties": 1, "type": "object"}, ['{"x": 1}'], ["{}"]),
    "one of": ({"oneOf": [{"type": "integer"}, {"const": "a"}]}, ["7", '"a"'], ['"b"']),
    "any of": ({"anyOf": [{"type": "integer"}, {"const": "a"}]}, ["7", '"a"'], ['"b"']),
    "types": ({"type": ["integer", "null"]}, ["7", "null"], ['"a"', "true"]),
    "values": ({"enum": [1, "a", None]}, ["1", '"a"', "null"], ["2", '"b"']),
}  # fmt: skip


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", SAME)
def test_both_hold_the_same_texts(name: str, compiler: str) -> None:
    schema, good, bad = SAME[name]
    check_texts(compiler_of(compiler), spec_of(schema), good=good, bad=bad)


AB = {"properties": {"a": {}, "b": {}}, "type": "object"}
# name: (schema, a text out of it that xgrammar takes); docs/limits.md lists them
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": ({"type": "array", "items": A, "uniqueItems": True}, "[1, 1]"),
    "contains": ({"type": "array", "contains": A}, "[2]"),
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "dependentSchemas": ({**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}'),
    "if": ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "1"),
    "not": ({"not": {"type": "integer"}}, "1"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "4"),
    "look-ahead": ({"type": "string", "pattern": "^(?=b)a+$"}, '"a"'),
    "format": ({"type": "string", "format": "regex"}, '"("'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_and_never_ignored(name: str) -> None:
    schema, wrong = REFUSED[name]
    with pytest.raises(GrammarInvalid):
        compiler_of("llguidance").compile(spec_of(schema))
    assert accepts(compiler_of("xgrammar"), spec_of(schema), wrong)


ONLY_THERE: dict[str, tuple[dict[str, Any], str, str]] = {
    "unevaluatedItems": ({"type": "array", "prefixItems": [A], "unevaluatedItems": False}, "[1]", "[1, 2]"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, '{"aa": 1}', '{"b": 1}'),
    "uri-reference": ({"type": "string", "format": "uri-reference"}, '"/a"', '"?? "'),
    "uri-template": ({"type": "string", "format": "uri-template"}, '"/{a}"', '"?? "'),
    "json-pointer": ({"type": "string", "format": "json-pointer"}, '"/a"', '"?? "'),
    "relative-json-pointer": ({"type": "string", "format": "relative-json-pointer"}, '"0/a"', '"?? "'),
}


@pytest.mark.parametrize("name", ONLY_THERE)
def test_what_xgrammar_alone_holds_is_refused(name: str) -> None:
    schema, good, bad = ONLY_THERE[name]
    with pytest.raises(GrammarInvalid, match=name):
        compiler_of("llguidance").compile(spec_of(schema))
    check_texts(compiler_of("xgrammar"), spec_of(schema), good=[good], bad=[bad])
