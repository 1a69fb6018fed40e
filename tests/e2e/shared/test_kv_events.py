"""KV events through real processes that share a secret: what the router believes is what the workers have cached."""

import asyncio
import random
import re
from typing import Any

import aiohttp

from tests.e2e.client import assert_all_back, generate, session
from tests.e2e.cluster import POLL_S, SETTLE_S, Cluster

METRIC = re.compile(r'tandem_router_worker_kv_event_tokens\{role="prefill",url="([^"]+)"\} ([0-9.e+]+)')


async def believed(http: aiohttp.ClientSession, cluster: Cluster) -> dict[str, int]:
    """Tokens cached by each prefill worker, by the router's metrics."""
    async with http.get(f"{cluster.router}/metrics") as response:
        return {url: int(float(value)) for url, value in METRIC.findall(await response.text())}


async def cached(http: aiohttp.ClientSession, cluster: Cluster) -> dict[str, int]:
    """The same, by the workers themselves."""
    found = {}
    for worker in cluster.of("prefill"):
        async with http.get(f"{worker.url}/check") as response:
            state: dict[str, Any] = await response.json()
        async with http.get(f"{worker.url}/server_info") as response:
            found[worker.url] = state["pages"]["cached"] * (await response.json())["page_size"]
    return found


async def wait_until_they_agree(http: aiohttp.ClientSession, cluster: Cluster) -> dict[str, int]:
    async with asyncio.timeout(SETTLE_S):
        while (known := await believed(http, cluster)) != (real := await cached(http, cluster)):
            await asyncio.sleep(POLL_S)
            assert set(known) <= set(real)
    return known


def test_the_router_knows_what_is_cached_and_sends_prompts_there(mooncake: Cluster) -> None:
    rng = random.Random(31)
    prompts = [[rng.randrange(16, 272) for _ in range(600)] for _ in range(3)]

    async def story() -> None:
        async with session() as http:
            first = [await generate(http, mooncake.router, body(prompt)) for prompt in prompts]
            assert all(answer["meta_info"]["cached_tokens"] < 128 for answer in first)
            await wait_until_they_agree(http, mooncake)
            again = [await generate(http, mooncake.router, body(prompt)) for prompt in (*prompts, *prompts)]
            assert all(answer["meta_info"]["cached_tokens"] >= 512 for answer in again)
            await assert_all_back(mooncake)
            async with http.post(f"{mooncake.router}/flush_cache") as response:
                assert response.status == 200, await response.text()
            assert set((await wait_until_they_agree(http, mooncake)).values()) == {0}

    asyncio.run(story())


def body(prompt: list[int]) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
