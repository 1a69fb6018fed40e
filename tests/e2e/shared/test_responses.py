"""/v1/responses by OpenAI's client, through a router over NIXL and at a unified worker behind one: what chat answers, both answer.

Tools and structured output need a vocabulary for JSON: tests/e2e/tiny/test_responses.py.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.client import assert_all_back
from tests.e2e.cluster import Cluster
from tests.e2e.shared.test_openai_client import PROMPT

MODEL: dict[str, Any] = {"model": "default", "temperature": 0}
LONG: dict[str, Any] = {"max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(params=["nixl", "unified"])
def served(request: pytest.FixtureRequest) -> Cluster:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def api(served: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.router}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def chat_of(api: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return api.chat.completions.create(**MODEL, messages=messages, **more)


def test_a_conversation_gives_the_tokens_of_chat(api: openai.OpenAI) -> None:
    """Turn by turn by id, against chat with all messages; the logprobs say that the same tokens were computed."""
    include: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 3}
    logprobs: Any = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3}
    messages: list[Any] = [{"role": "system", "content": "k05 v06"}]
    previous: Any = {}
    for text in (PROMPT, "k03", "k17 v42"):
        messages.append({"role": "user", "content": text})
        instructions = "k05 v06"
        answer = api.responses.create(**MODEL, input=text, instructions=instructions, **include, **previous)
        chat = chat_of(api, messages, **logprobs)
        shown = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
        assert answer.output_text == chat.choices[0].message.content
        assert [(lp.token, round(lp.logprob, 2)) for lp in shown] == [  # type: ignore[union-attr]
            (lp.token, round(lp.logprob, 2)) for lp in chat.choices[0].logprobs.content
        ]
        assert answer.usage is not None and answer.usage.input_tokens == chat.usage.prompt_tokens
        messages.append({"role": "assistant", "content": answer.output_text})
        previous = {"previous_response_id": answer.id}


def test_what_was_computed_before_is_cached(api: openai.OpenAI) -> None:
    text = " ".join(f"k{n:02d} v{n:02d}" for n in range(60))
    first = api.responses.create(**MODEL, input=text, max_output_tokens=1)
    second = api.responses.create(**MODEL, input="k17", previous_response_id=first.id, max_output_tokens=1)
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 60


def test_a_cancelled_response_keeps_what_it_had(served: Cluster, api: openai.OpenAI) -> None:
    stream = api.responses.create(**MODEL, **LONG, input=PROMPT, stream=True)
    created = next(iter(stream))
    assert created.type == "response.created"
    cancelled = api.responses.cancel(created.response.id)
    last = list(stream)[-1]
    assert cancelled.status == "cancelled" and last.type == "response.incomplete" and last.response == cancelled
    asyncio.run(assert_all_back(served))


def test_a_deadline_holds(served: Cluster, api: openai.OpenAI) -> None:
    late: Any = {"extra_headers": {"x-request-timeout": "0.2"}}
    with pytest.raises(openai.APIError) as refused:
        api.responses.create(**MODEL, **LONG, input=PROMPT, **late)
    assert isinstance(refused.value, openai.APIStatusError) and refused.value.status_code == 504
    with pytest.raises(openai.APIError):
        list(api.responses.create(**MODEL, **LONG, input=PROMPT, stream=True, **late))
    asyncio.run(assert_all_back(served))
