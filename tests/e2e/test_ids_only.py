"""Clusters whose checkpoint has no tokenizer (--skip-tokenizer-init): one worker, and pairs over NIXL behind a cache-aware router."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate_all, post, session, state_of
from tests.e2e.cluster import Cluster, cluster
from tests.e2e.settings import settings
from tests.e2e.workload import mixed_bodies
from tests.engine.engine_in_process import prompt_of, tokens_of
from tests.models.tiny_checkpoints import EOS

FLAGS = (
    *("--max-total-tokens", "65536", "--chunked-prefill-size", "64", "--log-level", "warning"),
    *("--stream", "threaded"),
)
WAYS = {
    "unified": ("--unified",),
    "pd": ("--transfer-backend", "nixl", "--prefill", "2", "--prefill-policy", "cache_aware"),
}
MAX_ERROR = 1e-4


@pytest.fixture(scope="module")
def bare(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model's configuration and weights, and nothing that writes text."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(qwen3, folder, ignore=shutil.ignore_patterns("*token*"))
    assert {file.name for file in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    return str(folder)


@pytest.fixture(scope="module")
def started(bare: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cluster]]:
    folder = tmp_path_factory.mktemp("ids")
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        args = ("--skip-tokenizer-init", "--model-path", bare, *FLAGS)
        env = settings(stream_delay_s=0.004)
        found = {
            name: threads.submit(stack.enter_context, cluster(folder / name, *way, *args, env=env))
            for name, way in WAYS.items()
        }
        yield {name: future.result() for name, future in found.items()}


@pytest.mark.parametrize("way", WAYS)
async def test_tokens_are_those_of_one_engine_and_no_answer_has_text(
    way: str, started: dict[str, Cluster], qwen3: str
) -> None:
    bodies = mixed_bodies(seed=2, count=16)
    answers = await generate_all(started[way].router, bodies)
    assert [a["output_ids"] for a in answers] == tokens_of(qwen3, bodies, depth=1, max_total_tokens=65536)
    assert all(a.keys() == {"output_ids", "meta_info"} for a in answers)
    (batch,) = await generate_all(
        started[way].router,
        [{"input_ids": [[20, 21], [30]], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}],
    )
    assert [len(one["output_ids"]) for one in batch] == [3, 3] and not any("text" in one for one in batch)
    await assert_all_back(started[way])


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_ends_by_token_ids(way: str, started: dict[str, Cluster]) -> None:
    """By the ids of the request, and by the EOS of the checkpoint's files."""
    url = started[way].router
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    (free,) = await generate_all(url, [{"input_ids": prompt_of(40, 1), "sampling_params": greedy}])
    stop = free["output_ids"][3]
    asked = {**greedy, "stop_token_ids": [stop]}
    forced = {**greedy, "ignore_eos": False, "logit_bias": {str(EOS): 100.0}}
    stopped, ended = await generate_all(
        url, [{"input_ids": prompt_of(40, 1), "sampling_params": params} for params in (asked, forced)]
    )
    first = free["output_ids"].index(stop)
    assert stopped["output_ids"] == free["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert ended["output_ids"] == [EOS] and ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    await assert_all_back(started[way])


async def test_logprobs_embeddings_and_scores_are_those_of_both_ways(started: dict[str, Cluster]) -> None:
    logprobs = {
        "input_ids": prompt_of(90, 4),
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 80,
        "top_logprobs_num": 2,
    }
    (one,), (two,) = [await generate_all(started[way].router, [logprobs]) for way in WAYS]
    assert one["output_ids"] == two["output_ids"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        rows, expected = two["meta_info"][name], one["meta_info"][name]
        assert [row[1:] for row in rows] == [row[1:] for row in expected] and {row[2] for row in rows} == {None}
        assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], abs=MAX_ERROR)
    found: list[list[float]] = []
    async with session() as http:
        for way in WAYS:
            url = started[way].router
            status, vectors = await post(http, f"{url}/v1/embeddings", {"input": [prompt_of(90, 5), [20]]})
            assert status == 200 and vectors["usage"]["prompt_tokens"] == 91, vectors
            score = {"query": prompt_of(70, 6), "items": [[20, 21], [30]], "label_token_ids": [40, 41]}
            status, scores = await post(http, f"{url}/v1/score", score)
            assert status == 200, scores
            completion = {"model": "default", "prompt": prompt_of(40, 1), "max_tokens": 3, "return_token_ids": True}
            status, completed = await post(http, f"{url}/v1/completions", {**completion, "temperature": 0})
            assert status == 200 and completed["choices"][0]["text"] == "", completed
            found.append(
                [
                    *(x for row in vectors["data"] for x in row["embedding"]),
                    *(x for row in scores["scores"] for x in row),
                    *map(float, completed["choices"][0]["token_ids"]),
                ]
            )
    assert found[0] == pytest.approx(found[1], abs=MAX_ERROR)


async def test_the_router_sends_token_ids_to_the_worker_that_has_their_prefix(started: dict[str, Cluster]) -> None:
    """Conversations of 256 tokens, one after the other, then each goes on: none is computed twice.

    Their number is odd: workers in turn would get those of the other one.
    """
    pd, size, count = started["pd"], 256, 13
    prefills = pd.of("prefill")

    async def counts() -> list[float]:
        return [(await state_of(worker.url))["counters"].get("cached_tokens", 0) for worker in prefills]

    def asked(turn: int) -> list[dict[str, Any]]:
        return [
            {"input_ids": [*prompt_of(size, 100 + i), *[50 + turn] * 9], "sampling_params": {"max_new_tokens": 2}}
            for i in range(count)
        ]

    for body in asked(0):
        await generate_all(pd.router, [body])
    before = await counts()
    for body in asked(1):
        await generate_all(pd.router, [body])
    news = [after - old for after, old in zip(await counts(), before, strict=True)]
    assert sum(news) >= count * size and all(news), "both have prefixes, and each is found where it is"
