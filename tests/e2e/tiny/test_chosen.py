"""Logprobs of chosen ids, hidden states and embeddings: the same through two workers as through one."""

import asyncio
from typing import Any

import openai
import pytest

from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster
from tests.engine.engine_in_process import prompt_of

MAX_ERROR = 1e-4


async def both(unified: Cluster, pd: Cluster, bodies: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    answers = [await generate_all(c.router, bodies) for c in (unified, pd)]
    await assert_all_back(pd)
    return answers[0], answers[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_chosen_ids_and_hidden_states(unified: Cluster, pd: Cluster, stream: bool) -> None:
    body = {
        "input_ids": prompt_of(150, 1),
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 2,
        "token_ids_logprob": [270, 20],
        "return_hidden_states": True,
        "stream": stream,
    }
    (one,), (two,) = await both(unified, pd, [body])
    assert one["output_ids"] == two["output_ids"]
    for name, count in (("input_token_ids_logprobs", 148), ("output_token_ids_logprobs", 5)):
        rows, expected = two["meta_info"][name], one["meta_info"][name]
        assert len(rows) == count and [[e[1] for e in row] for row in rows] == [[270, 20]] * count
        for row, expected_row in zip(rows, expected, strict=True):
            assert [e[0] for e in row] == pytest.approx([e[0] for e in expected_row], abs=MAX_ERROR)
    ours, theirs = two["meta_info"]["hidden_states"], one["meta_info"]["hidden_states"]
    assert len(ours) == len(theirs) == 5 and len(ours[0]) == 150
    for got, expected in zip([*ours[0], *ours[1:]], [*theirs[0], *theirs[1:]], strict=True):
        assert got == pytest.approx(expected, abs=MAX_ERROR) and len(got) == 64


def test_embeddings_by_the_openai_client(unified: Cluster, pd: Cluster) -> None:
    inputs: list[Any] = ["hello", ["hello", "there"], prompt_of(90, 5), [prompt_of(90, 5), prompt_of(3, 6)]]
    vectors: list[list[list[float]]] = []
    for c in (unified, pd):
        with openai.OpenAI(base_url=f"{c.router}/v1", api_key="none") as client:
            answers = [client.embeddings.create(model="default", input=i) for i in inputs]  # base64 inside
            plain = client.embeddings.create(model="default", input="hello", encoding_format="float")
        assert answers[2].usage.prompt_tokens == 90 and [len(a.data) for a in answers] == [1, 2, 1, 2]
        assert plain.data[0].embedding == pytest.approx(answers[0].data[0].embedding)
        vectors.append([d.embedding for a in answers for d in a.data])
        assert sum(x * x for x in vectors[-1][0]) == pytest.approx(1.0, abs=MAX_ERROR)
    for got, expected in zip(vectors[1], vectors[0], strict=True):
        assert got == pytest.approx(expected, abs=MAX_ERROR)
    asyncio.run(assert_all_back(pd))
