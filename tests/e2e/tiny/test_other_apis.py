"""Anthropic's and Ollama's APIs by their official clients, unified and disaggregated: the tokens are those of chat.

Random weights: what comes out is in the grammar because of the grammar alone.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import ollama
import pytest

from tests.e2e.client import assert_all_back
from tests.e2e.cluster import Cluster
from tests.e2e.tiny.test_grammar import PERSON, TOOL, USER

GREEDY: dict[str, Any] = {"temperature": 0}
NUM_TOKENS = 24
FUNCTION: dict[str, Any] = TOOL["function"]
STRICT: Any = {**TOOL, "function": {**FUNCTION, "strict": True}}
TOOLS: Any = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
        "strict": True,
    }
]


@pytest.fixture
def claude(way: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=way.router, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def llama(way: Cluster) -> Iterator[ollama.Client]:
    with ollama.Client(host=way.router, timeout=60) as client:
        yield client


def chat_of(way: Cluster, **asked: Any) -> tuple[str, int]:
    """Reasoning and text of a chat's greedy answer, and its prompt's tokens."""
    answer = httpx.post(f"{way.router}/v1/chat/completions", json={**GREEDY, **asked}, timeout=60).json()
    message = answer["choices"][0]["message"]
    return (message["reasoning_content"] or "") + (message["content"] or ""), answer["usage"]["prompt_tokens"]


def text_of(message: Any) -> str:
    return "".join(getattr(block, "thinking", "") or getattr(block, "text", "") for block in message.content)


def prompt_of(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens)


# ---- Anthropic


def test_a_message_has_the_tokens_of_a_chat(way: Cluster, claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "default", "messages": USER, "system": "Be brief.", "extra_body": GREEDY}
    wanted, num_prompt = chat_of(
        way, messages=[{"role": "system", "content": "Be brief."}, *USER], max_tokens=NUM_TOKENS
    )
    whole = claude.messages.create(**asked, max_tokens=NUM_TOKENS)
    with claude.messages.stream(**asked, max_tokens=NUM_TOKENS) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert text_of(answer) == wanted and answer.stop_reason == "max_tokens"
        assert (prompt_of(answer.usage), answer.usage.output_tokens) == (num_prompt, NUM_TOKENS)
    counted = claude.messages.count_tokens(model="default", messages=USER, system="Be brief.")
    assert counted.input_tokens == num_prompt
    asyncio.run(assert_all_back(way))


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": FUNCTION["name"]}])
def test_a_tool_goes_round(way: Cluster, claude: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {"model": "default", "tools": TOOLS, "max_tokens": 120, "extra_body": GREEDY}
    forced = {**choice, "disable_parallel_tool_use": True}
    first = claude.messages.create(**asked, messages=USER, tool_choice=forced)
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert (
        first.stop_reason == "tool_use"
        and call.name == FUNCTION["name"]
        and set(call.input) == set(PERSON["properties"])
    )
    with claude.messages.stream(**asked, messages=USER, tool_choice=forced) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        streamed = stream.get_final_message()
    assert json.loads(partial) == call.input and streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    turns: Any = [*USER, first.to_param(), {"role": "user", "content": [result]}]
    second = claude.messages.create(**{**asked, "max_tokens": 12}, messages=turns)
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    answered = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    messages = [*USER, answered, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    wanted, num_prompt = chat_of(way, messages=messages, tools=[STRICT], max_tokens=12)
    counted = claude.messages.count_tokens(model="default", messages=turns, tools=TOOLS).input_tokens
    assert prompt_of(second.usage) == num_prompt == counted and text_of(second) == wanted
    asyncio.run(assert_all_back(way))


# ---- Ollama


def test_ollama_has_the_tokens_of_a_chat(way: Cluster, llama: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": NUM_TOKENS}
    wanted, num_prompt = chat_of(way, messages=USER, max_tokens=NUM_TOKENS)
    whole = llama.chat("default", USER, options=options)
    parts = list(llama.chat("default", USER, options=options, stream=True))
    generated = list(llama.generate("default", USER[0]["content"], options=options, stream=True))
    assert (whole.message.thinking or "") + (whole.message.content or "") == wanted
    assert "".join((p.message.thinking or "") + (p.message.content or "") for p in parts) == wanted
    assert "".join((p.thinking or "") + (p.response or "") for p in generated) == wanted
    for last in (whole, parts[-1], generated[-1]):
        assert (last.done_reason, last.prompt_eval_count, last.eval_count) == ("length", num_prompt, NUM_TOKENS)
        assert last.total_duration > last.eval_duration > 0 < last.prompt_eval_duration
    asyncio.run(assert_all_back(way))


# ---- both


def test_errors_of_a_worker_pass_the_router_in_their_shape(claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be"):
        claude.messages.create(model="default", messages=USER, max_tokens=-1)
    with pytest.raises(ollama.ResponseError, match=r"^options\.top_p: must be"):
        llama.chat("default", USER, options={"top_p": 5})
