"""The shipped model's answers cross two processes over real engines: exact. (Without the bytes: test_identity_matrix.py.)"""

import asyncio
import random

from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster
from tests.e2e.workload import recall_body

NUM_RECALLS = 40


def test_recall_is_exact(pd: Cluster) -> None:
    assert asyncio.run(recall_accuracy(pd)) == 1.0
    asyncio.run(assert_all_back(pd))


async def recall_accuracy(c: Cluster) -> float:
    rng = random.Random(7)
    drawn = [recall_body(rng, rng.randint(5, 250), max_new_tokens=4) for _ in range(NUM_RECALLS)]
    answers = await generate_all(c.router, [body for body, _ in drawn])
    return sum(a["output_ids"] == wanted for a, (_, wanted) in zip(answers, drawn, strict=True)) / NUM_RECALLS
