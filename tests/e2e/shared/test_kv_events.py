"""KV events through real processes that share a secret: what the router believes is what the workers have cached."""

import asyncio
import json
import random
import re
from typing import Any

from tests.e2e.client import assert_all_back, generate_all, post, session, state_of, text_of
from tests.e2e.cluster import POLL_S, SETTLE_S, Cluster

METRIC = re.compile(r'tandem_router_worker_kv_event_tokens\{role="prefill",url="([^"]+)"\} ([0-9.e+]+)')


async def believed(cluster: Cluster) -> dict[str, int]:
    """Tokens cached by each prefill worker, by the router's metrics."""
    return {url: int(float(value)) for url, value in METRIC.findall(await text_of(f"{cluster.router}/metrics"))}


async def cached(cluster: Cluster) -> dict[str, int]:
    """The same, by the workers themselves."""
    found = {}
    for worker in cluster.of("prefill"):
        info = json.loads(await text_of(f"{worker.url}/server_info"))
        found[worker.url] = (await state_of(worker.url))["pages"]["cached"] * info["page_size"]
    return found


async def wait_until_they_agree(cluster: Cluster) -> dict[str, int]:
    async with asyncio.timeout(SETTLE_S):
        while (known := await believed(cluster)) != (real := await cached(cluster)):
            await asyncio.sleep(POLL_S)
            assert set(known) <= set(real)
    return known


async def test_the_router_knows_what_is_cached_and_sends_prompts_there(mooncake: Cluster) -> None:
    rng = random.Random(31)
    prompts = [[rng.randrange(16, 272) for _ in range(600)] for _ in range(3)]
    first = [(await generate_all(mooncake.router, [body(prompt)]))[0] for prompt in prompts]
    assert all(answer["meta_info"]["cached_tokens"] < 128 for answer in first)
    await wait_until_they_agree(mooncake)
    again = [(await generate_all(mooncake.router, [body(prompt)]))[0] for prompt in (*prompts, *prompts)]
    assert all(answer["meta_info"]["cached_tokens"] >= 512 for answer in again)
    await assert_all_back(mooncake)
    async with session() as http:
        assert (await post(http, f"{mooncake.router}/flush_cache", {}))[0] == 200
    assert set((await wait_until_they_agree(mooncake)).values()) == {0}


def body(prompt: list[int]) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
