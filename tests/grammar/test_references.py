"""References of schemas: right wherever a schema stands (an answer's, a forced tool's, a strict tool's), by our compiler and the second opinion."""

import json
from typing import Any

import pytest

from engine.frontend.apis.chat.tools import Tool, ToolFunction, forced_calls, strict_calls
from engine.frontend.apis.shared.constraints import Constraint
from engine.grammar.compiler import closed
from engine.grammar.queue import Compiler
from engine.sampling_params import GrammarInvalid, GrammarSpec
from engine.schema_references import BadReference, local, moved
from engine.text.tagged_call import ArgumentTypes
from engine.text.tool_calls import QWEN25
from service.http.errors import ApiError
from tests.grammar.compilers import COMPILERS, accepts, compiler_of

E: dict[str, Any] = {"enum": ["hot", "cold"]}


def having(reference: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": {"$ref": reference}}, "required": ["k"], **more}


RIGHT: dict[str, dict[str, Any]] = {
    "$defs": having("#/$defs/K", **{"$defs": {"K": E}}),
    "definitions": having("#/definitions/K", definitions={"K": E}),
    "a property": having("#/properties/z", properties={"z": E, "k": {"$ref": "#/properties/z"}}),
    "an item of a list": having("#/$defs/x/anyOf/1", **{"$defs": {"x": {"anyOf": [{}, E]}}}),
    "no schema's place": having("#/components/K", components={"K": E}),
    "escapes": having("#/$defs/a~1b~0c", **{"$defs": {"a/b~c": E}}),
    "percent": having("#/definitions/A%3Cstring%3E", definitions={"A<string>": E}),
    "letters that a URI encodes": having("#/definitions/Ä<b>", definitions={"Ä<b>": E}),
    "a literal percent": having("#/definitions/a%41", definitions={"a%41": E}),
    "an anchor": having("#a", **{"$defs": {"K": {"$anchor": "a", **E}}}),
    "an anchor of draft 7": having("#a", definitions={"K": {"$id": "#a", **E}}),
    "an id": having("k", **{"$id": "http://e.com/r", "$defs": {"K": {"$id": "k", **E}}}),
    "its own id": having("http://e.com/r#/$defs/K", **{"$id": "http://e.com/r", "$defs": {"K": E}}),
    "below an id": having("#/$defs/K", **{"$defs": {"K": {"$id": "urn:k", "$ref": "#/$defs/K", "$defs": {"K": E}}}}),
    "a chain": having("#/$defs/A", **{"$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]}, "B": E}}),
    "a property named $ref": having("#/properties/$ref", properties={"$ref": E, "k": {"$ref": "#/properties/$ref"}}),
    "of the whole": {"$ref": "#/$defs/A", "$defs": {"A": having("#/$defs/K"), "K": E}},
    "two alike": having("#/$defs/K", properties={"k": {"$ref": "#/$defs/K"}, "z": {"$ref": "#/definitions/K"}},
        **{"$defs": {"K": E}, "definitions": {"K": {"type": "integer"}}}),
}  # fmt: skip


@pytest.fixture(scope="module", params=COMPILERS)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return compiler_of(str(request.param))


def tool(parameters: dict[str, Any], name: str = "f", *, strict: bool | None = None) -> Tool:
    return Tool(function=ToolFunction(name=name, parameters=parameters, strict=strict))


def spec_of(constraint: Constraint | None) -> GrammarSpec:
    assert constraint is not None
    return constraint.spec


def ways(schema: dict[str, Any]) -> dict[str, tuple[GrammarSpec, str]]:
    """What constrains, and the text around a value that it holds; the other function's definitions have the same names."""
    other = having("#/$defs/K", **{"$defs": {"K": {"type": "integer"}}})
    forced = spec_of(forced_calls([tool(other, "g"), tool(schema)], only_one=True))
    strict = spec_of(strict_calls([tool(other, "g"), tool(schema, strict=True)], QWEN25))
    return {
        "answer": (GrammarSpec("json_schema", json.dumps(schema)), "VALUE"),
        "forced": (forced, '[{"name": "f", "parameters": VALUE}]'),
        "strict": (strict, '<tool_call>\n{"name": "f", "arguments": VALUE}\n</tool_call>'),
    }


@pytest.mark.parametrize("name", RIGHT)
def test_a_reference_means_the_same_wherever_its_schema_stands(compiler: Compiler, name: str) -> None:
    for way, (spec, text) in ways(RIGHT[name]).items():
        hot, warm = (text.replace("VALUE", f'{{"k": "{value}"}}') for value in ("hot", "warm"))
        assert accepts(compiler, spec, hot) and not accepts(compiler, spec, warm), way


TREE = {"type": "object", "properties": {"v": E, "kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["v"]}


def test_a_schema_may_hold_itself(compiler: Compiler) -> None:
    for way, (spec, text) in ways(TREE).items():
        good = text.replace("VALUE", '{"v": "hot", "kids": [{"v": "cold", "kids": []}]}')
        bad = text.partition("VALUE")[0] + '{"v": "hot", "kids": [{"n'
        assert accepts(compiler, spec, good) and not accepts(compiler, spec, bad), way


def test_functions_with_the_same_names_keep_their_own_definitions(compiler: Compiler) -> None:
    spec, text = ways(RIGHT["$defs"])["forced"]
    mine, others = text.replace("VALUE", '{"k": 7}'), text.replace("VALUE", '{"k": 7}').replace('"f"', '"g"')
    assert accepts(compiler, spec, others) and not accepts(compiler, spec, mine)


BAD = {
    "http://e.com/other": "$ref 'http://e.com/other': only references into the schema itself can be followed",
    "#/$defs/N": "$ref '#/$defs/N': no schema stands there",
    "#/required/-1": "$ref '#/required/-1': no schema stands there",
    "#/type": "$ref '#/type': no schema stands there",
    "#nowhere": "$ref '#nowhere': no schema stands there",
}


@pytest.mark.parametrize("reference", BAD)
def test_a_reference_that_cannot_be_followed_is_named(compiler: Compiler, reference: str) -> None:
    with pytest.raises(GrammarInvalid) as invalid:
        compiler.compile(GrammarSpec("json_schema", json.dumps(having(reference))))
    assert str(invalid.value) == BAD[reference]
    for strict in (True, False):
        with pytest.raises(ApiError) as refused:
            forced_calls([tool(having(reference), strict=strict)], only_one=True)
        assert (refused.value.status, refused.value.field) == (400, "tools")
        assert f"the parameters of 'f': {BAD[reference]}" in str(refused.value)


def test_a_schema_that_no_grammar_can_hold_is_refused_before_it_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.frontend.apis.shared.constraints.moved", lambda *args, **kwargs: pytest.fail("walked"))
    long = {"properties": {str(i): {"$ref": "#"} for i in range(60_000)}}
    with pytest.raises(ApiError, match=r"the parameters of 'f': must have at most 262144 characters"):
        forced_calls([tool(long)], only_one=True)


def test_dynamic_references_are_refused() -> None:
    for key in ("$dynamicRef", "$recursiveRef"):
        with pytest.raises(BadReference, match=r"is not supported; write \$ref"):
            local({"items": {key: "#"}})


@pytest.mark.parametrize("key", ["$ref", "$id"])
def test_what_is_no_uri_is_named(key: str) -> None:
    schema = {"$id": "http://a/b", "properties": {"k": {key: "http://[x"}, "z": {"$ref": "#"}}}
    with pytest.raises(BadReference, match=rf"^\{key} 'http://\[x': is no URI"):
        local(schema)
    assert ArgumentTypes(schema).of("k") == frozenset()


def test_what_looks_like_a_reference_and_is_none_stays() -> None:
    schema = having("#/$defs/K", **{"$defs": {"K": {"const": {"$ref": "#/no"}, "default": {"$id": 1}}}})
    assert local(schema) == schema
    assert local({"$defs": {"K": {"$ref": "#/no"}}}) == {"$defs": {"K": {"$ref": "#/no"}}}, "nothing leads there"


def test_a_schema_moves_under_names_of_its_own() -> None:
    schema, definitions = moved(TREE, namespace="f")
    assert schema == {"$ref": "#/$defs/f"}
    assert definitions["f"]["properties"]["kids"]["items"] == {"$ref": "#/$defs/f"}
    assert moved(RIGHT["$defs"], namespace="f") == (having("#/$defs/f:K"), {"f:K": E})


def test_an_escaped_reference_to_a_part_of_an_object_leaves_it_open() -> None:
    a = {"properties": {"a": {}}}
    schema = closed({"$defs": {"x/y": a}, "properties": {"b": {}}, "allOf": [{"$ref": "#/$defs/x~1y"}]})
    assert list(schema["$defs"].values()) == [a] and "additionalProperties" not in schema
