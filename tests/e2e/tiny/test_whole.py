"""Requests without bootstrap fields at the workers of a pair: each serves them whole, with a unified worker's tokens."""

import asyncio
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate, generate_all, post, session, text_of
from tests.e2e.cluster import Cluster
from tests.e2e.workload import mixed_bodies

MAX_ERROR = 1e-4
WHOLE = pytest.mark.parametrize("role", ["prefill", "decode"])


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@WHOLE
async def test_whole_requests_beside_pairs_give_the_tokens_of_a_unified_worker(
    unified: Cluster, pd: Cluster, role: str
) -> None:
    bodies = mixed_bodies(seed=3, count=24)
    reference = tokens(await generate_all(unified.router, bodies))
    (worker,) = pd.of(role)
    whole, paired = await asyncio.gather(generate_all(worker.url, bodies), generate_all(pd.router, bodies))
    assert tokens(whole) == reference == tokens(paired)
    assert '"serves_whole":true' in (await text_of(f"{worker.url}/get_server_info")).replace(" ", "")
    await assert_all_back(pd)


@WHOLE
async def test_logprobs_of_a_prompt_and_scores_at_one_worker(unified: Cluster, pd: Cluster, role: str) -> None:
    body = {"input_ids": [*range(40, 200)], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body |= {"sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    score = {"query": "a", "items": ["b", "c"], "label_token_ids": [20, 30]}
    (worker,) = pd.of(role)
    async with session() as http:
        said = [await generate(http, url, body) for url in (unified.router, worker.url)]
        scores = [await post(http, f"{url}/v1/score", score) for url in (unified.router, worker.url)]
        vectors = [await post(http, f"{url}/v1/embeddings", {"input": "a b"}) for url in (unified.router, worker.url)]
    one, two = (answer["meta_info"] for answer in said)
    for name, count in (("input_token_logprobs", 160), ("output_token_logprobs", 4)):
        (first, *rows), (first_expected, *expected) = two[name], one[name]
        assert len(rows) == count - 1 and [row[1] for row in (first, *rows)] == [row[1] for row in one[name]]
        assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], abs=MAX_ERROR)
        assert (first[0] is None) == (first_expected[0] is None) == name.startswith("input")
    for (status, expected), (own_status, got) in (scores, vectors):
        assert status == own_status == 200 and expected["usage"] == got["usage"]
    assert scores[1][1]["scores"][1] == pytest.approx(scores[0][1]["scores"][1], abs=MAX_ERROR)
    assert vectors[1][1]["data"][0]["embedding"] == pytest.approx(vectors[0][1]["data"][0]["embedding"], abs=MAX_ERROR)
    await assert_all_back(pd)
