"""Requests sent to one worker of a pair alone, over both real transfer engines: right, and cut off at any moment."""

import asyncio
import contextlib
import random

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, generate, generate_all, session
from tests.e2e.cluster import Cluster
from tests.e2e.workload import recall_body


@pytest.mark.parametrize("pd", ["nixl", pytest.param("mooncake", marks=pytest.mark.slow)], indirect=True)
async def test_whole_requests_and_pairs_at_once_while_clients_leave(pd: Cluster) -> None:
    rng = random.Random(11)
    urls = [pd.router, *(worker.url for worker in pd.workers)]
    asked = [(url, *recall_body(rng, rng.randint(5, 250), max_new_tokens=8)) for url in urls * 8]
    async with session() as http:
        victims = [_left(http, url, rng.random() * 0.3, rng) for url in urls * 6]
        answers = [generate(http, url, body) for url, body, _ in asked]
        found, _ = await asyncio.gather(asyncio.gather(*answers), asyncio.gather(*victims))
    assert [answer["output_ids"] for answer in found] == [wanted for _, _, wanted in asked]
    await assert_all_back(pd)
    body, wanted = recall_body(rng, 40, max_new_tokens=4)
    assert [(await generate_all(url, [body]))[0]["output_ids"] for url in urls] == [wanted] * len(urls)


async def _left(http: aiohttp.ClientSession, url: str, after_s: float, rng: random.Random) -> None:
    """A long answer whose client leaves, at a moment that is drawn."""
    body, _ = recall_body(rng, rng.randint(5, 250), max_new_tokens=2000)
    body["sampling_params"]["ignore_eos"] = True
    request = asyncio.create_task(generate(http, url, {**body, "stream": rng.random() < 0.5}))
    await asyncio.sleep(after_s)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
