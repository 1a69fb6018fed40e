"""Logprobs of chosen ids, hidden states and embeddings: the same through two workers as through one."""

import asyncio
import math
from typing import Any

import aiohttp
import openai
import pytest

from tests.e2e.client import assert_all_back, generate_all, post, session
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


async def test_encode_is_sglangs_shape_of_an_embedding(unified: Cluster, pd: Cluster) -> None:
    async with session() as http:
        for c in (unified, pd):
            _, plain = await post(http, f"{c.router}/v1/embeddings", {"input": "hello"})
            status, one = await post(http, f"{c.router}/encode", {"text": "hello"})
            assert status == 200 and one["embedding"] == pytest.approx(plain["data"][0]["embedding"], abs=MAX_ERROR)
            assert one["meta_info"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] and one["meta_info"]["id"]
            async with http.put(f"{c.router}/encode", json={"text": ["hello"]}) as answer:
                (listed,) = await answer.json()
            assert listed["embedding"] == pytest.approx(one["embedding"], abs=MAX_ERROR)
            _, ids = await post(http, f"{c.router}/encode", {"input_ids": prompt_of(90, 5)})
            _, two = await post(http, f"{c.router}/encode", {"input_ids": [prompt_of(90, 5), [20]], "rid": "mine"})
            assert two[0]["embedding"] == pytest.approx(ids["embedding"], abs=MAX_ERROR)
            assert [row["meta_info"]["id"] for row in two] == ["mine-0", "mine-1"]
    await assert_all_back(pd)


LABELS = [270, 20, 33]


async def scores(http: aiohttp.ClientSession, c: Cluster, **body: Any) -> list[list[float]]:
    status, answer = await post(http, f"{c.router}/v1/score", {"label_token_ids": LABELS, **body})
    assert status == 200 and answer["object"] == "scoring", answer
    return answer["scores"]  # type: ignore[no-any-return]


async def test_scores_are_the_probabilities_that_generate_reports(unified: Cluster, pd: Cluster) -> None:
    query, items = prompt_of(70, 3), [prompt_of(9, 4), prompt_of(80, 5)]
    asked = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "token_ids_logprob": LABELS}
    prompts = [*(query + item for item in items), *(item + query for item in items)]
    answers = await generate_all(unified.router, [{"input_ids": ids, **asked} for ids in prompts])
    rows = [[e[0] for e in a["meta_info"]["output_token_ids_logprobs"][0]] for a in answers]
    expected = [[math.exp(logprob) for logprob in row] for row in rows]
    async with session() as http:
        for c in (unified, pd):
            got = await scores(http, c, query=query, items=items)
            got += await scores(http, c, query=query, items=items, item_first=True)
            assert all(one == pytest.approx(row, rel=1e-3) for one, row in zip(got, expected, strict=True))
            softmax = await scores(http, c, query=query, items=items, apply_softmax=True)
            for one, row in zip(softmax, expected, strict=False):
                assert sum(one) == pytest.approx(1) and one == pytest.approx([p / sum(row) for p in row], rel=1e-3)
            (one,) = await scores(http, c, query="a b", items=" c")
            assert one == pytest.approx((await scores(http, c, query="a b", items=[" d", " c"]))[1], rel=1e-3)
    await assert_all_back(pd)
