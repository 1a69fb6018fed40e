"""A budget for reasoning and a schema behind it through real processes, unified and disaggregated, by the `openai` client.

Random weights never end their reasoning by themselves, and what follows it is in the schema because of the schema alone.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.client import assert_all_back
from tests.e2e.cluster import Cluster
from tests.e2e.tiny.test_grammar import PERSON

BUDGET = 7
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think>"}]
THINKS: Any = {"continue_final_message": True, "thinking_token_budget": BUDGET}
END = len("</think>")  # one token a byte


def client_of(c: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{c.router}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def clients(unified: Cluster, pd: Cluster) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    with client_of(unified) as one, client_of(pd) as two:
        yield one, two


async def test_the_budget_holds_and_the_schema_begins_behind_it(
    clients: tuple[openai.OpenAI, openai.OpenAI], unified: Cluster, pd: Cluster
) -> None:
    kwargs: Any = {"model": "default", "messages": MESSAGES, "max_tokens": 90, "temperature": 0.9, "n": 2}
    for seed, format in ((1, FORMAT), (2, FORMAT), (3, openai.NOT_GIVEN)):
        answers = [
            c.chat.completions.create(**kwargs, seed=seed, response_format=format, extra_body=THINKS) for c in clients
        ]
        messages = [[choice.message.model_dump() for choice in answer.choices] for answer in answers]
        assert messages[0] == messages[1], "disaggregated = unified"
        for answer in answers:
            assert answer.usage is not None and answer.usage.completion_tokens_details is not None
            assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * (BUDGET + END)
            for choice in answer.choices:
                if format is FORMAT:
                    assert set(json.loads(choice.message.content or "")) == {"name", "age"}
        with clients[1].chat.completions.create(
            **kwargs, seed=seed, response_format=format, extra_body=THINKS, stream=True
        ) as stream:
            shown: list[dict[str, str]] = [{}, {}]
            for chunk in stream:
                for streamed in chunk.choices:
                    for name in ("reasoning_content", "content"):
                        text = getattr(streamed.delta, name, None) or ""
                        shown[streamed.index][name] = shown[streamed.index].get(name, "") + text
        expected = [{name: m[name] or "" for name in ("reasoning_content", "content")} for m in messages[0]]
        assert shown == expected
    await assert_all_back(unified)
    await assert_all_back(pd)


def test_a_closed_reasoning_leaves_the_grammar_at_the_beginning(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    closed: Any = [MESSAGES[0], {"role": "assistant", "content": "<think></think>"}]
    for client in clients:
        answer = client.chat.completions.create(
            model="default", messages=closed, max_tokens=60, response_format=FORMAT, extra_body=THINKS
        )
        assert set(json.loads(answer.choices[0].message.content or "")) == {"name", "age"}
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
