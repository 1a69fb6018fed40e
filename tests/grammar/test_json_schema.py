"""Which objects of a schema are closed, with literals."""

from typing import Any

import pytest

from engine.grammar.compiler import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {}}}
CLOSED_A: dict[str, Any] = {**A, "additionalProperties": False}
REF_X = {"$ref": "#/$defs/X"}
CLOSED_B: dict[str, Any] = {**B, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"properties": {"x": A}}, {"properties": {"x": CLOSED_A}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"items": [A], "additionalProperties": B}, {"items": [CLOSED_A], "additionalProperties": CLOSED_B}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        ({"$defs": {"X": A}, "$ref": "#/$defs/X"}, {"$defs": {"X": CLOSED_A}, "$ref": "#/$defs/X"}),
        ({"$defs": {"X": A}, "allOf": [REF_X]}, {"$defs": {"X": CLOSED_A}, "allOf": [REF_X]}),
    ],
)
def test_what_is_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


OPEN: list[Any] = [
    {"type": "object"},
    True,
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
    {"properties": {"a": {}}, "unevaluatedProperties": False},
    {"allOf": [A, B]},
    {**A, "anyOf": [B, {}]},
    {**A, "allOf": [B]},
    {"if": A, "then": B},
    {"not": A},
    {"enum": [{"properties": {"a": 1}}], "default": A},
    {"$defs": {"X": A, "Y": B}, "allOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}]},
    {"$defs": {"X": A, "Y": {"$ref": "#/$defs/X"}}, **B, "allOf": [{"$ref": "#/$defs/Y"}]},
    {"$defs": {"X": A}, **B, "$ref": "#/$defs/X"},
]


@pytest.mark.parametrize("schema", OPEN, ids=range(len(OPEN)))
def test_what_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


def test_parts_of_an_object_stay_open_and_what_is_inside_them_is_closed() -> None:
    inside = {"properties": {"x": A}}
    assert closed({"allOf": [inside, B]}) == {"allOf": [{"properties": {"x": CLOSED_A}}, B]}
