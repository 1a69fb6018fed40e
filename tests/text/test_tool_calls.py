"""Reading tool calls out of text: the same calls whatever the chunks, and nothing lost that is no call."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.parts import Arguments, CallBegins, PlainText
from engine.text.tool_calls import ARRAY, LLAMA3, QWEN25, CallFormat, ToolCalls

NAMES = ("add", "look_up")
Read = tuple[str, list[tuple[str, str]]]


def read(format: CallFormat, chunks: list[str]) -> Read:
    """(text, calls as (name, arguments))."""
    reader = ToolCalls(format, NAMES)
    parts = [part for chunk in chunks for part in reader.feed(chunk)] + reader.end()
    text, calls = "", []
    for part in parts:
        match part:
            case PlainText(text=more):
                text += more
            case CallBegins(index=index, name=name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index=index, text=more):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + more)
    assert reader.num_calls == len(calls)
    return text, calls


CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"{"}]}}'
ADD = ("add", '{"a": 1, "b": [2, {"c": "}\\"{"}]}')
OTHER = '{"parameters": {"q": "<tool_call>"}, "name": "look_up"}'
LOOK_UP = ("look_up", '{"q": "<tool_call>"}')

CASES: list[tuple[CallFormat, str, Read]] = [
    (QWEN25, "just text\n", ("just text\n", [])),
    (QWEN25, f"<tool_call>\n{CALL}\n</tool_call>", ("", [ADD])),
    (
        QWEN25,
        f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
        ("Let me see.", [ADD, LOOK_UP]),
    ),
    (QWEN25, f"<tool_call>{CALL}</tool_call> and so on", (" and so on", [ADD])),
    (QWEN25, f"<tool_call>\n{CALL}", ("", [ADD])),  # ended by the closing tag as a stop string, or by length
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": {"a', ("", [("add", '{"a')])),
    (QWEN25, '<tool_call>\n{"name": "add"}\n</tool_call>', ("", [("add", "{}")])),
    (QWEN25, '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>', ("", [("add", '{"a": 1}')])),
    (
        QWEN25,
        '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
        ('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', []),
    ),
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
]


@pytest.mark.parametrize(("format", "text", "expected"), CASES, ids=range(len(CASES)))
def test_calls_and_text_whatever_the_chunks(format: CallFormat, text: str, expected: Read) -> None:
    assert read(format, [text]) == expected
    assert read(format, list(text)) == expected
    for seed in range(20):
        rng, chunks, at = random.Random(seed), [], 0
        while at < len(text):
            size = rng.randint(1, 9)
            chunks.append(text[at : at + size])
            at += size
        assert read(format, chunks) == expected


def test_arguments_stream_before_their_call_ends() -> None:
    reader = ToolCalls(QWEN25, NAMES)
    begin = '<tool_call>\n{"name": "add", "arguments": {"a": '
    assert reader.feed(begin) == [CallBegins(0, "add"), Arguments(0, '{"a":')]
    assert reader.feed("12") == [Arguments(0, " 12")]
    assert reader.feed("}}\n</tool_call>") == [Arguments(0, "}")]


@given(
    st.sampled_from([QWEN25, LLAMA3, ARRAY]),
    st.lists(
        st.one_of(
            st.text(max_size=8),
            st.sampled_from(
                ["<tool_call>", "</tool_call>", "<|python_tag|>", "[", "]", ";", ",", "\n", CALL, OTHER, "{", '"']
            ),
        ),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_any_text_in_any_chunks(format: CallFormat, pieces: list[str], rng: random.Random) -> None:
    text = "".join(pieces)
    whole = read(format, [text])
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format, chunks) == whole
    for name, arguments in whole[1]:
        assert (name in NAMES and arguments in text) or json.loads(arguments) is not None
