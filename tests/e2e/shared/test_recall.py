"""The shipped model's answers cross two processes: exact over real engines, lost where no bytes move."""

import asyncio
import random

import pytest

from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import SHIPPED, Cluster, cluster
from tests.e2e.workload import recall_body

NUM_RECALLS = 40


def test_recall_is_exact(pd: Cluster) -> None:
    assert asyncio.run(recall_accuracy(pd)) == 1.0
    asyncio.run(assert_all_back(pd))


def test_recall_is_exact_in_one_process_too(unified: Cluster) -> None:
    assert asyncio.run(recall_accuracy(unified)) == 1.0


def test_recall_collapses_when_no_bytes_move(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fake backend says that everything has landed: the tests above can fail."""
    with cluster(tmp_path_factory.mktemp("fake"), "--transfer-backend", "fake", *SHIPPED) as c:
        assert asyncio.run(recall_accuracy(c)) < 0.1
        asyncio.run(assert_all_back(c))


async def recall_accuracy(c: Cluster) -> float:
    rng = random.Random(7)
    drawn = [recall_body(rng, rng.randint(5, 250), max_new_tokens=4) for _ in range(NUM_RECALLS)]
    answers = await generate_all(c.router, [body for body, _ in drawn])
    return sum(a["output_ids"] == wanted for a, (_, wanted) in zip(answers, drawn, strict=True)) / NUM_RECALLS
