"""Reading tool calls out of text: the same calls whatever the chunks, and nothing lost that is no call."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.parts import ShownParts, first_call
from engine.text.sample import Arguments, CallBegins, ToolCall, joined
from engine.text.tagged_call import ArgumentTypes, value_of
from engine.text.tool_calls import (
    ARRAY,
    CALL_FORMATS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    KIMI_K2,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    QWEN25,
    CallFormat,
    ToolCalls,
)
from tests.text import chunks

FUNCTIONS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
    "look_up": {"type": "object", "properties": {"q": {"type": "string"}, "deep": {"type": "boolean"},
        "at": {"type": ["string", "null"]}}},
}  # fmt: skip
Read = tuple[str, list[tuple[str, str]]]


def read(format: CallFormat, pieces: list[str]) -> Read:
    """(text, calls as (name, arguments))."""
    reader = ToolCalls(format, FUNCTIONS)
    answer = chunks.read(reader, pieces)
    assert reader.num_calls == len(answer.calls)
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"{"}]}}'
ADD = ("add", '{"a": 1, "b": [2, {"c": "}\\"{"}]}')
OTHER = '{"parameters": {"q": "<tool_call>"}, "name": "look_up"}'
LOOK_UP = ("look_up", '{"q": "<tool_call>"}')

CASES: list[tuple[CallFormat, str, Read]] = [
    (QWEN25, "just text\n", ("just text\n", [])),
    (QWEN25, f"<tool_call>\n{CALL}\n</tool_call>", ("", [ADD])),
    (QWEN25, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
     ("Let me see.", [ADD, LOOK_UP])),
    (QWEN25, f"<tool_call>{CALL}</tool_call> and so on", (" and so on", [ADD])),
    (QWEN25, f"<tool_call>\n{CALL}", ("", [ADD])),  # ended by the closing tag as a stop string, or by length
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": {"a', ("", [("add", "{}")])),
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x',
     ("", [("add", '{"a": 1, "b": [2, "x"]}')])),
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": tr', ("", [("add", '{"a": 1}')])),
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": ', ('<tool_call>\n{"name": "add", "arguments": ', [])),
    # slips: a brace too few, raw line breaks, escapes and constants that JSON does not have, a comma too many
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call> so', (" so", [("add", '{"a": 1}')])),
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>', ("", [("add", '{"a": 1}')])),
    (LLAMA3, '{"name": "look_up", "parameters": {"q": "a\n\tb"}}', ("", [("look_up", '{"q": "a\\n\\tb"}')])),
    (LLAMA3, r"""{"name": "look_up", "parameters": {"q": "\d'\'"}}""", ("", [("look_up", r"""{"q": "\\d''"}""")])),
    (LLAMA3, r'{"name": "look_up", "parameters": {"q": "\ud83d\ude00\ud83d"}}',
     ("", [("look_up", r'{"q": "\ud83d\ude00\ufffd"}')])),
    (LLAMA3, '{"name": "look_up", "parameters": {"deep": True,}}', ("", [("look_up", '{"deep": true}')])),
    # arguments of nothing, inside a string, of another kind
    (QWEN25, '<tool_call>{"name": "add", "arguments": null}</tool_call>', ("", [("add", "{}")])),
    (QWEN25, '<tool_call>{"arguments": "", "name": "add"}</tool_call>', ("", [("add", "{}")])),
    (QWEN25, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1"}</tool_call>', ("", [("add", '{"a": 1}')])),
    *[(QWEN25, text, (text, [])) for wrong in ("7", "[1]", "true", '"so"', '"{} x"', "oops", "NaN")
        for text in (f'<tool_call>{{"name": "add", "arguments": {wrong}}}</tool_call>',)],
    # what breaks behind its begin is closed, and the rest is text
    (LLAMA3, '{"name": "add", "parameters": {"a": 1, b: 2}}', (", b: 2}}", [("add", '{"a": 1}')])),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1, "b": NaN}} so', (', "b": NaN}} so', [("add", '{"a": 1}')])),
    (QWEN25, '<tool_call>\n{"name": "add"}\n</tool_call>', ("", [("add", "{}")])),
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>', ("", [("add", '{"a": 1}')])),
    (QWEN25, '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
     ('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', [])),
    (QWEN25, "<tool_call>\nnothing</tool_call>", ("<tool_call>\nnothing</tool_call>", [])),
    (QWEN25, "a <tool_", ("a <tool_", [])),
    (QWEN25, '<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    (QWEN25, '<tool_call>{"name": "ad', ('<tool_call>{"name": "ad', [])),
    (QWEN25, CALL, (CALL, [])),
    (LLAMA3, CALL, ("", [ADD])),
    (LLAMA3, f"{CALL}; {OTHER}", ("", [ADD, LOOK_UP])),
    (LLAMA3, f"<|python_tag|>{CALL}", ("", [ADD])),
    (LLAMA3, f"Well: <|python_tag|>{CALL};{OTHER}", ("Well:", [ADD, LOOK_UP])),
    (LLAMA3, '{"answer": 42}', ('{"answer": 42}', [])),
    (LLAMA3, "  {oh", ("  {oh", [])),
    (LLAMA3, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (LLAMA3, "  plain {text}", ("  plain {text}", [])),
    (ARRAY, f" [{CALL},\n{OTHER}]", ("", [ADD, LOOK_UP])),
    (ARRAY, f"[{CALL}", ("", [ADD])),
    (ARRAY, "[", ("[", [])),
    (ARRAY, "no array", ("no array", [])),
    (QWEN25, "   ", ("   ", [])),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {OTHER}]", ("", [ADD, LOOK_UP])),
    (MISTRAL, f"So: [TOOL_CALLS]add[ARGS]{ADD[1]}", ("So:", [ADD])),
    (MISTRAL, '[TOOL_CALLS]add[CALL_ID]x7[ARGS]{}[TOOL_CALLS]look_up[ARGS]{"q": 1}',
     ("", [("add", "{}"), ("look_up", '{"q": 1}')])),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2', ("", [("add", '{"a": 1, "b": [2]}')])),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]null", ("", [("add", "{}")])),
    (MISTRAL, "[TOOL_CALLS]add[ARGS][1]", ("[TOOL_CALLS]add[ARGS][1]", [])),
    (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}", ("[TOOL_CALLS]rm[ARGS]{}", [])),
    (MISTRAL, "[TOOL_CALLS] or so", ("[TOOL_CALLS] or so", [])),
    (PYTHONIC, "[add(a=1, b=[2, {'c': '}\"{'}])]", ("", [ADD])),
    (PYTHONIC, "[add(a=1), look_up(q='x)(', deep=True)]",
     ("", [("add", '{"a": 1}'), ("look_up", '{"q": "x)(", "deep": true}')])),
    (PYTHONIC, "[look_up(q=None, deep=true), add()]", ("", [("look_up", '{"q": null, "deep": true}'), ("add", "{}")])),
    (PYTHONIC, "[1, 2]", ("[1, 2]", [])),
    (PYTHONIC, "[add(1)]", ("[add(1)]", [])),
    (PYTHONIC, "[add(a=f())]", ("[add(a=f())]", [])),
    (PYTHONIC, "[add(a=b'x')]", ("[add(a=b'x')]", [])),
    (PYTHONIC, "[add(a=1e999)]", ("[add(a=1e999)]", [])),
    (PYTHONIC, "[add(a='\\d')]", ("", [("add", '{"a": "\\\\d"}')])),
    (PYTHONIC, "Call [add(a=1)]", ("Call [add(a=1)]", [])),
    (PYTHONIC, "[add(a=1", ("[add(a=1", [])),
    (PYTHONIC, "[look_up(q='\\ud800')]", ("", [("look_up", '{"q": "?"}')])),
    (LLAMA4, "[add(a=1)]", ("", [("add", '{"a": 1}')])),
    (LLAMA4, "Hm. <|python_start|>[add(a=1), add(a=2)]<|python_end|>",
     ("Hm.", [("add", '{"a": 1}'), ("add", '{"a": 2}')])),
    (DEEPSEEK_V3, "Hm.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n" + ADD[1] +
     '\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"q": "```"}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ("Hm.", [ADD, ("look_up", '{"q": "```"}')])),
    (DEEPSEEK_V31, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD[1]}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ("", [ADD, ("look_up", "{}")])),
    # without the section's begin
    (DEEPSEEK_V31, "So. <｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     ("So.", [("add", "{}")])),
    (DEEPSEEK_V31, "<｜tool▁calls▁begin｜>nothing", ("<｜tool▁calls▁begin｜>nothing", [])),
    (KIMI_K2, f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{ADD[1]}"
     "<|tool_call_end|><|tool_call_begin|>functions.look_up:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", ("", [ADD, ("look_up", "{}")])),
    (GLM45, "Hm.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
     '<arg_value>[2, {"c": "}\\"{"}]</arg_value>\n</tool_call>\n<tool_call>look_up\n<arg_key>q</arg_key>\n'
     "<arg_value>12</arg_value>\n</tool_call>", ("Hm.", [ADD, ("look_up", '{"q": "12"}')])),
    (GLM45, "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", ("", [("add", '{"a": 1}')])),
    (GLM45, "<tool_call>add</tool_call> done", ("done", [("add", "{}")])),
    (GLM45, "<tool_call>rm\n</tool_call>", ("<tool_call>rm\n</tool_call>", [])),
    (GLM45, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1", ("", [("add", '{"a": 1}')])),
    (GLM45, "<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>[1", ("", [("add", "{}")])),
    (GLM45, "<tool_call>look_up\n<arg_key>q</arg_key>\n<arg_value>a b</arg_", ("", [("look_up", '{"q": "a b"}')])),
    (GLM45, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>NaN</arg_value>", ("", [("add", '{"a": "NaN"}')])),
    (GLM45, "<tool_call>look_up<arg_key>at</arg_key><arg_value>[a", ("", [("look_up", '{"at": "[a"}')])),
    (GLM45, "<tool_call>add\n<arg_x", ("<tool_call>add\n<arg_x", [])),
    (GLM45, "<tool_call>add\n", ("<tool_call>add\n", [])),
    (QWEN3_CODER, "Hm.\n<tool_call>\n<function=look_up>\n<parameter=q>\na\n<b>\n</parameter>\n"
     "<parameter=deep>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
     "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
     ("Hm.", [("look_up", '{"q": "a\\n<b>", "deep": true}'), ("add", '{"a": 1}')])),
    (QWEN3_CODER, "<tool_call>\n<function=add>\n</function>\n</tool_call>", ("", [("add", "{}")])),
    *[(QWEN3_CODER, text + ends, ("", [("look_up", '{"q": "abc"}')]))
        for text in ("<tool_call>\n<function=look_up>\n<parameter=q>\nabc",)
        for ends in ("", "\n</param", "\n</parameter>", "\n</parameter>\n</function>", "\n</parameter>\n</tool_call>")],
    # without the first tag
    (QWEN3_CODER, "I look.\n\n<function=look_up>\n<parameter=q>\n*.md\n</parameter>\n</function>\n</tool_call>\n"
     "<function=add>\n</function> done", ("I look.\n\n\ndone", [("look_up", '{"q": "*.md"}'), ("add", "{}")])),
    (QWEN3_CODER, text := "<function=" * 3 + "x" * 300, (text, [])),
    (QWEN3_CODER, text := "<tool_call><function=add><parameter=" + "x" * 800, (text, [])),
    (GLM45, text := "<tool_call>" + "x" * 300, (text, [])),
    (QWEN3_CODER, "Write <function=add> there", ("Write <function=add> there", [])),
    (QWEN3_CODER, "<function=rm>\n</function>", ("<function=rm>\n</function>", [])),
    (QWEN3_CODER, "<tool_call>\nfunction", ("<tool_call>\nfunction", [])),
    (QWEN3_CODER, "<tool_call><function=add><parameter=a>1</function></tool_call>", ("", [("add", '{"a": 1}')])),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "expected"), CASES, ids=range(len(CASES)))
def test_calls_and_text_in_any_chunks(format: CallFormat, text: str, expected: Read) -> None:
    for pieces in chunks.splits(text):
        assert read(format, pieces) == expected


def test_texts_in_tags_stream_before_they_end() -> None:
    reader = ToolCalls(QWEN3_CODER, FUNCTIONS)
    reader.feed("<tool_call>\n<function=look_up>\n<parameter=q>\n")
    assert reader.feed('one "two"\n') == [Arguments(0, 'one \\"two\\"')]
    assert reader.feed("three\n</para") == [Arguments(0, "\\nthree")]
    assert reader.feed("meter>\n") == [Arguments(0, '"')]
    assert reader.feed("</function>") == [Arguments(0, "}")]


def test_every_format_has_a_case() -> None:
    assert {id(f) for f in CALL_FORMATS.values()} <= {id(case[0]) for case in CASES}


def test_the_id_that_a_model_writes_is_kept() -> None:
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{}"
    assert joined(ToolCalls(KIMI_K2, FUNCTIONS).feed(text)).calls == [ToolCall("add", "functions.add:3", "{}")]


def test_calls_after_the_first_may_be_left_out() -> None:
    reader = ShownParts(ToolCalls(LLAMA3, FUNCTIONS), first_call)
    assert joined(reader.feed(f"{CALL}; {OTHER}") + reader.end()).calls == [ToolCall("add", "", ADD[1])]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"$ref": "#/$defs/e"}, "1"),
        ("1", {"$ref": "#/$defs/a~1b"}, "1"),
        ("1", {"$ref": "#/$defs/loop"}, 1),
        ("1", {"$ref": "#/$defs/nowhere"}, 1),
        ("1", {"allOf": [{"$ref": "#/$defs/e"}], "description": "x"}, "1"),
        ("true", {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}]}, "true"),
        ("null", {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}]}, None),
        ("12", {"const": "12"}, "12"),
        ("12", {"anyOf": [{"type": "string"}, {}]}, 12),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {}, "NaN"),
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", None, 12),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "12"),
        ("12", {"enum": ["12", "13"]}, "12"),
        ("True", {"type": "boolean"}, True),
        ("so so", {"type": "integer"}, "so so"),
        ("[1, 2]", {}, [1, 2]),
        ("x", "no schema", "x"),
    ],
)
def test_the_schema_says_what_a_text_is(text: str, schema: object, value: object) -> None:
    parameters = {"properties": {"v": schema}, "$defs": DEFINITIONS}
    assert value_of(text, ArgumentTypes(parameters).of("v")) == value


DEFINITIONS = {"e": {"type": "string", "enum": ["1"]}, "a/b": {"enum": ["1"]}, "loop": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"v": {"type": "string"}}}}},
        {"allOf": [{"properties": {"w": {}}}, {"properties": {"v": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"v": {"type": "string"}}}, {"properties": {"v": {"const": "1"}}}]},
        {"properties": {"w": {}}, "additionalProperties": {"type": "string"}},
        {"properties": {"v": {"type": "string"}, "w": {"$ref": "http://e.com/"}}},
    ],
)
def test_the_type_of_an_argument_is_found_wherever_its_schema_stands(parameters: object) -> None:
    assert ArgumentTypes(parameters).of("v") == {"string"}


@pytest.mark.parametrize("parameters", [None, 5, {}, {"properties": 3}, {"properties": {"v": {"type": 3, "enum": 3}}}])
def test_a_schema_that_says_nothing_allows_any_type(parameters: object) -> None:
    assert ArgumentTypes(parameters).of("v") == frozenset()


def test_arguments_stream_before_their_call_ends() -> None:
    reader = ToolCalls(QWEN25, FUNCTIONS)
    begin = '<tool_call>\n{"name": "add", "arguments": {"a": '
    assert reader.feed(begin) == [CallBegins(0, "add"), Arguments(0, "{")]
    assert reader.feed('12, "b": ["x') == [Arguments(0, '"a": 12, "b": ["x')]
    assert reader.feed("y\\") == [Arguments(0, "y")]
    assert reader.feed('n"]}}\n</tool_call>') == [Arguments(0, '\\n"]}')]


_FORMATS = [ARRAY, *CALL_FORMATS.values()]
MARKS = {m for f in _FORMATS for m in (f.marker, f.bare, f.bracket, f.opener, f.separator, *f.fillers, f.closer) if m}
INSIDE = ["add", "(", ")", "a=1", "[ARGS]", "{}", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "\n", '"', ">"]
MORE = [
    "<parameter=a>", "</parameter>", "</function>", "<｜tool▁sep｜>", "functions.add:0", "<|tool_call_argument_begin|>",
]  # fmt: skip


@given(
    st.sampled_from(_FORMATS),
    st.lists(st.text(max_size=8) | st.sampled_from([*sorted(MARKS), *INSIDE, *MORE, CALL, OTHER]), max_size=12),
    st.randoms(use_true_random=False),
)
def test_any_text_in_any_chunks(format: CallFormat, pieces: list[str], rng: random.Random) -> None:
    text = "".join(pieces)
    whole = read(format, [text])
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format, parts) == read(format, list(text)) == whole
    assert whole[1] or whole[0] == text
    for name, arguments in whole[1]:
        assert name in FUNCTIONS and isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)


LIST = json.dumps(json.loads(ADD[1])["b"])
WRITTEN = {  # a call to add, with what a reader makes of it
    "qwen25": f"<tool_call>\n{CALL}\n</tool_call>",
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "llama4": "<|python_start|>[add(a=1, b=[2, {'c': '}\"{'}])]<|python_end|>",
    "deepseekv31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD[1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{ADD[1]}<|tool_call_end|>",
    "glm45": f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>{LIST}"
    "</arg_value>\n</tool_call>",
    "qwen3_coder": f"<function=add>\n<parameter=a>1</parameter>\n<parameter=b>{LIST}</parameter>\n</function>",
}


@given(st.sampled_from(list(WRITTEN)), st.lists(st.text("ab é.\n", max_size=9), min_size=2, max_size=4))
def test_text_around_calls_is_kept(name: str, words: list[str]) -> None:
    text = WRITTEN[name].join(words)
    shown, calls = whole = read(CALL_FORMATS[name], [text])
    assert calls == [ADD] * (len(words) - 1) and read(CALL_FORMATS[name], list(text)) == whole
    assert "".join(shown.split()) == "".join("".join(words).split())


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.one_of(st.integers(), st.text(max_size=9), st.none())))
def test_arguments_are_what_the_model_wrote(arguments: dict[str, object]) -> None:
    written = json.dumps(arguments)
    for format, text in (
        (QWEN25, f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'),
        (MISTRAL, f"[TOOL_CALLS]add[ARGS]{written}"),
    ):
        ((_, shown),) = read(format, [text])[1]
        assert json.loads(shown) == arguments
