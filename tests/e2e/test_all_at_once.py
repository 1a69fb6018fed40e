"""The command of docs/tuning.md with all features on, as it stands but for its port: the tokens of one plain worker, and each feature has run."""

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, post, session, text_of
from tests.e2e.cluster import SETTLE_S, Cluster, cluster, tandem
from tests.frontend.vision import file_of, picture, url_of

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
MODEL = ("--model-path", "docs/tiny-qwen3.5-moe", "--load-format", "dummy")
# Flags without which a feature is off.
FEATURES = {
    "--prefill": "1",
    "--decode": "1",
    "--chunked-prefill-size": "64",
    "--stream": "threaded",
    "--mm-enable-dp-encoder": None,
    "--vlm-cache-size-mb": "16",
    "--enable-eplb": None,
    "--speculative-algorithm": "NEXTN",
}
NEW = 48
FILES = [file_of(picture(64 + 16 * seed, 48, seed=seed)) for seed in range(3)]
IMAGES: list[list[int]] = [[], [0], [1], [2, 0, 2]]
Metrics = dict[str, float]


def command() -> list[str]:
    """The arguments of `tandem up` on the page."""
    (found,) = re.findall(r"```\n\.venv/bin/tandem up ((?:[^`]+\\\n)+[^`]+)\n```", PAGE)
    return shlex.split(found.replace("\\\n", " "))


def chat(images: list[int], words: int) -> dict[str, Any]:
    """Longer than a chunk."""
    parts = [{"type": "image_url", "image_url": {"url": url_of(FILES[image])}} for image in images]
    content = [*parts, {"type": "text", "text": "What do you see? " * words}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW, "temperature": 0}
    return {**body, "ignore_eos": True, "return_token_ids": True}


CHATS = [chat(images, words) for images in IMAGES for words in (4, 9)]


async def tokens_of(url: str) -> list[list[int]]:
    async with session() as http:
        answers = await asyncio.gather(*(post(http, f"{url}/v1/chat/completions", body) for body in CHATS))
    assert all(status == 200 for status, _ in answers), answers
    return [answer["choices"][0]["token_ids"] for _, answer in answers]


async def metrics_of(url: str) -> Metrics:
    lines = [line.rpartition(" ") for line in (await text_of(f"{url}/metrics")).splitlines() if line[:1] != "#"]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of a unified worker of one rank, with nothing on."""
    with tandem(tmp_path_factory.mktemp("plain"), "serve", *MODEL, "--port", "0") as worker:
        return asyncio.run(tokens_of(worker.url))


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("seed"), *command()) as c:
        yield c
        asyncio.run(assert_all_back(c))


def test_the_command_has_every_feature_on() -> None:
    given = command()
    assert all(flag in given for flag in MODEL)
    for flag, value in FEATURES.items():
        assert flag in given and value in (None, given[given.index(flag) + 1]), flag


async def test_its_answers_are_those_of_a_plain_worker(right: list[list[int]], seed: Cluster) -> None:
    """Round for round: experts move and drafts are tried from time to time."""
    assert len({tuple(tokens) for tokens in right}) == len(right) and all(len(tokens) == NEW for tokens in right)
    (prefill,), (decode,) = seed.of("prefill"), seed.of("decode")
    deadline_s = monotonic() + SETTLE_S
    while not _all_ran(computes := await metrics_of(prefill.url), decodes := await metrics_of(decode.url)):
        assert monotonic() < deadline_s, (computes, decodes)
        assert await tokens_of(seed.router) == right
    assert computes["tandem_num_encoded_images_total"] == len(FILES), "each image once, whatever comes again"
    assert decodes["tandem_num_encoded_images_total"] == 0
    for worker in (computes, decodes):
        assert worker["tandem_expert_failed_layers"] == 0


def _all_ran(prefill: Metrics, decode: Metrics) -> bool:
    moved = [
        worker["tandem_expert_rebalances"] and worker["tandem_expert_moved_layers"] for worker in (prefill, decode)
    ]
    drafts = decode["vllm:spec_decode_num_draft_tokens_total"]
    return bool(all(moved) and drafts and prefill["vllm:mm_cache_hits_total"])
