"""Structured output and tools of /v1/responses by OpenAI's client, unified and disaggregated: the tokens are those of chat.

Random weights: what comes out is in the grammar because of the grammar alone.
"""

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import ResponseFunctionToolCall

from tests.e2e.client import assert_all_back
from tests.e2e.cluster import Cluster
from tests.e2e.tiny.test_grammar import PERSON, TOOL, USER

FLAT_TOOL: Any = {"type": "function", **TOOL["function"], "strict": True}
SEEDED: dict[str, Any] = {"model": "default", "extra_body": {"seed": 3}}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["ada", "bob"]


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**SEEDED, input="hello", text_format=Person, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Person) and parsed.status == "completed"
    with client.responses.stream(**SEEDED, input="hello", text_format=Person, max_output_tokens=60) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    schema = {"type": "json_schema", "json_schema": {"name": "Person", "schema": Person.model_json_schema()}}
    chat = client.chat.completions.create(**SEEDED, messages=USER, response_format=schema, max_tokens=60)  # type: ignore[call-overload]
    assert chat.choices[0].message.content == parsed.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "greet"}])
def test_a_tool_goes_round(way: Cluster, client: openai.OpenAI, choice: Any) -> None:
    """Its output comes by `previous_response_id`: the model sees the whole exchange, as chat would send it."""
    forced: Any = {"tools": [FLAT_TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 120}
    first = client.responses.create(**SEEDED, input="hello", **forced)
    (call,) = (item for item in first.output if isinstance(item, ResponseFunctionToolCall))
    assert call.name == "greet" and set(json.loads(call.arguments)) == set(PERSON["properties"])
    with client.responses.stream(**SEEDED, input="hello", **forced) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
    assert snapshots[-1] == call.arguments
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = client.responses.create(
        **SEEDED, input=[output], previous_response_id=first.id, tools=[FLAT_TOOL], max_output_tokens=12
    )
    function = {"name": "greet", "arguments": call.arguments}
    messages: Any = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]
    tool: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    chat = client.chat.completions.create(**SEEDED, messages=messages, tools=[tool], max_tokens=12)
    assert second.usage is not None and chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    reasoning = [part.text for item in second.output if item.type == "reasoning" for part in item.content or []]
    assert second.output_text == (chat.choices[0].message.content or "")
    assert "".join(reasoning) == (getattr(chat.choices[0].message, "reasoning_content", None) or "")
    asyncio.run(assert_all_back(way))
