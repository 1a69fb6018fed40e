"""For tests of workers that change their role: streams that run meanwhile, and what workers say of themselves."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx2 as httpx

from tests.e2e.client import generate, session
from tests.e2e.cluster import POLL_S, Cluster, Worker
from tests.e2e.workload import recall_body

NUM_CLIENTS = 4
NUM_PAIRS = 120
NEW_TOKENS = 12
ENOUGH = 3  # answers of each client between two switches


@asynccontextmanager
async def streams(
    url: str,
    *,
    num_clients: int = NUM_CLIENTS,
    num_pairs: int = NUM_PAIRS,
    new_tokens: int = NEW_TOKENS,
    rest_s: float = 0.0,
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Clients that stream one answer after another, each checked, and rest between two of them.

    Yields what waits until each has had some more.
    """
    stop, counts = asyncio.Event(), [0] * num_clients

    async def client(http: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            body, expected = recall_body(rng, num_pairs, max_new_tokens=new_tokens)
            answer = await generate(http, url, {**body, "stream": True})
            assert answer["output_ids"] == expected
            counts[number] += 1
            await asyncio.sleep(rest_s)

    async def more() -> None:
        wanted = [count + ENOUGH for count in counts]
        while any(count < want for count, want in zip(counts, wanted, strict=True)):
            for failed in [task for task in tasks if task.done()]:
                failed.result()
            await asyncio.sleep(POLL_S)

    async with session() as http:
        tasks = [asyncio.create_task(client(http, number)) for number in range(num_clients)]
        try:
            yield more
        finally:
            stop.set()
            await asyncio.gather(*tasks)


def num_served(worker: Worker, role: str) -> float:
    """Requests of this life of the worker, counted under its role."""
    text = httpx.get(f"{worker.url}/metrics").text
    return sum(float(n) for n in re.findall(rf'^sglang:num_requests_total{{[^}}]*"{role}"[^}}]*}} (\S+)$', text, re.M))


def server_info(worker: Worker) -> dict[str, Any]:
    return httpx.get(f"{worker.url}/server_info").json()  # type: ignore[no-any-return]


async def move(http: aiohttp.ClientSession, up: Cluster, worker: Worker, role: str) -> dict[str, Any]:
    async with http.post(f"{up.router}/workers/role", json={"url": worker.url, "role": role}) as response:
        said = await response.json()
        assert response.status == 200, said
        return said  # type: ignore[no-any-return]
