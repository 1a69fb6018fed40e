"""Constrained answers and forced tool calls through real processes, unified and disaggregated.

Random weights: what comes out is in the grammar because of the grammar alone.
"""

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from tests.e2e.client import assert_all_back, generate_all, text_of
from tests.e2e.cluster import Cluster

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": json.dumps(PERSON)},
    {"json_schema": PERSON},
    {"regex": "[a-c]{3,9}-[0-9];"},
    {"ebnf": 'root ::= "yes" | "no" | "no, " root'},
    {},
]
TOOL: Any = {"type": "function", "function": {"name": "greet", "description": "says hello", "parameters": PERSON}}
USER: Any = [{"role": "user", "content": "hello"}]


def bodies() -> list[dict[str, Any]]:
    """Short and long prompts, greedy and drawn, streamed or not, plain ones among them."""
    return [
        {
            "text": f"{i}: " + "say something " * (1 + 7 * (i % 3 == 0)),
            "sampling_params": {"max_new_tokens": 60, "temperature": 0.9 * (i % 2), "seed": i, **GRAMMARS[i % 5]},
            "stream": i % 4 == 0,
        }
        for i in range(20)
    ]


@pytest.fixture(scope="module")
def reference(unified: Cluster) -> list[dict[str, Any]]:
    """(That they do not depend on the depth: tests/grammar/test_engine.py.)"""
    return asyncio.run(generate_all(unified.router, bodies()))


async def test_answers_are_in_their_grammar_and_the_same_everywhere(
    way: Cluster, reference: list[dict[str, Any]]
) -> None:
    """Twice: the second time prefixes are cached, and grammars compiled."""
    for i, answer in enumerate(reference):
        if i % 5 < 2:
            person = json.loads(answer["text"])
            assert person["name"] in ("ada", "bob") and 0 <= person["age"] <= 150
        elif i % 5 == 2:
            assert re.fullmatch("[a-c]{3,9}-[0-9];", answer["text"])
        elif i % 5 == 3:
            assert re.fullmatch(r"(no, )*(yes|no)", answer["text"])
    for _ in range(2):
        answers = await generate_all(way.router, bodies())
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in reference]
        await assert_all_back(way)


def test_response_format(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(model="default", messages=USER, max_tokens=60, response_format=format)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"name", "age"}
    assert answer.choices[0].finish_reason == "stop"
    free = client.chat.completions.create(
        model="default", messages=USER, max_tokens=30, response_format={"type": "json_object"}
    )
    assert (free.choices[0].message.content or "").startswith("{")
    text = client.completions.create(model="default", prompt="x", max_tokens=20, extra_body={"regex": "[a-c]{5}"})
    assert re.fullmatch("[a-c]{5}", text.choices[0].text)


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "greet"}}, "required"])
def test_a_forced_tool_call(client: openai.OpenAI, choice: Any) -> None:
    kwargs: Any = {"messages": USER, "max_tokens": 120, "tools": [TOOL], "tool_choice": choice, "seed": 3}
    kwargs["parallel_tool_calls"] = False
    whole = client.chat.completions.create(model="default", **kwargs).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == "greet"
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
    names, arguments, reasons = [], "", []
    for chunk in client.chat.completions.create(model="default", stream=True, **kwargs):
        delta = chunk.choices[0].delta
        assert not delta.content
        for part in delta.tool_calls or []:
            assert part.index == 0 and part.function is not None
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert names == ["greet"] and arguments == call.function.arguments and reasons == ["tool_calls"]


def test_a_forced_custom_tool(client: openai.OpenAI) -> None:
    """Its input is a text in the tool's own regex."""
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-c]{4,8}"}}
    tool: Any = {"type": "custom", "custom": {"name": "spell", "format": grammar}}
    choice: Any = {"type": "custom", "custom": {"name": "spell"}}
    answer = client.chat.completions.create(
        model="default", messages=USER, max_tokens=120, tools=[tool, TOOL], tool_choice=choice, seed=4
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "custom" and call.custom.name == "spell" and re.fullmatch("[a-c]{4,8}", call.custom.input)


def test_allowed_tools(client: openai.OpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "other"}}
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "greet"}}]}
    answer = client.chat.completions.create(
        model="default",
        messages=USER,
        max_tokens=120,
        tools=[other, TOOL],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "greet"


async def test_grammar_metrics(way: Cluster) -> None:
    body = {"text": "x", "sampling_params": {"regex": "[d-f]{5}"}}
    for _ in range(2):
        await generate_all(way.router, [body])
    metrics = await text_of(f"{way.workers[-1].url}/metrics")
    (hits,) = re.findall(r"^sglang:num_grammar_cache_hit_total\{.*\} ([0-9.]+)$", metrics, re.MULTILINE)
    assert float(hits) >= 1 and "sglang:num_grammar_queue_reqs" in metrics
