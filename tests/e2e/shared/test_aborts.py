"""Clients that go away at any moment, by closing the connection or by /abort_request: nothing is left behind."""

import asyncio
import contextlib
import random
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, generate, generate_all, post, session
from tests.e2e.cluster import Cluster
from tests.e2e.workload import recall_body

AT_ONCE = 20


@pytest.mark.parametrize("pd", ["nixl", pytest.param("mooncake", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("num_aborts", [60, pytest.param(200, marks=pytest.mark.slow)])
async def test_random_aborts_leave_nothing_behind(pd: Cluster, num_aborts: int) -> None:
    """Victims among requests that are let live: those must not notice."""
    rng = random.Random(3)
    gate = asyncio.Semaphore(AT_ONCE)
    async with session() as http:
        victims = [_victim(http, pd, gate, rng.random() * 0.25, rng, i) for i in range(num_aborts)]
        others = [_bystander(http, pd, gate, rng) for _ in range(num_aborts // 6)]
        await asyncio.gather(*victims, *others)
    await assert_all_back(pd)
    body, wanted = recall_body(random.Random(5), 50, max_new_tokens=4)
    assert (await generate_all(pd.router, [body]))[0]["output_ids"] == wanted


async def _victim(
    http: aiohttp.ClientSession, c: Cluster, gate: asyncio.Semaphore, after_s: float, rng: random.Random, i: int
) -> None:
    body, _ = recall_body(rng, rng.randint(5, 250))
    rid = f"victim-{i}"
    body |= {"rid": rid, "stream": rng.random() < 0.5}
    body["sampling_params"] |= {"max_new_tokens": 2000, "ignore_eos": True}
    by_name = rng.random() < 0.3
    async with gate:
        request = asyncio.create_task(_read_all(http, c, body))
        await asyncio.sleep(after_s)  # the moment of the abort, drawn
        if by_name:
            async with http.post(f"{c.router}/abort_request", json={"rid": rid}) as response:
                assert response.status == 200, await response.text()
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request


async def _read_all(http: aiohttp.ClientSession, c: Cluster, body: dict[str, Any]) -> None:
    async with http.post(f"{c.router}/generate", json=body) as response:
        async for _ in response.content.iter_any():
            pass


async def _bystander(http: aiohttp.ClientSession, c: Cluster, gate: asyncio.Semaphore, rng: random.Random) -> None:
    body, wanted = recall_body(rng, rng.randint(5, 250), max_new_tokens=8)
    async with gate:
        answer = await generate(http, c.router, body)
    assert answer["output_ids"] == wanted


async def test_a_request_past_its_deadline_ends_with_504_and_leaves_nothing(nixl: Cluster) -> None:
    """Decode holds it, and prefill (paused) where it cannot begin."""
    body, _ = recall_body(random.Random(9), 50)
    body["sampling_params"] |= {"max_new_tokens": 4000, "ignore_eos": True}
    (prefill,) = nixl.of("prefill")
    async with session() as http:
        await _assert_late(http, nixl, body, status=504)
        await _assert_late(http, nixl, body | {"stream": True}, status=200)  # it had begun
        assert (await post(http, f"{prefill.url}/pause_generation", {"mode": "in_place"}))[0] == 200
        await _assert_late(http, nixl, body, status=504)
        assert (await post(http, f"{prefill.url}/continue_generation", {}))[0] == 200
    await assert_all_back(nixl)


async def _assert_late(http: aiohttp.ClientSession, c: Cluster, body: dict[str, Any], *, status: int) -> None:
    async with http.post(f"{c.router}/generate", json=body, headers={"x-request-timeout": "0.5"}) as response:
        text = await response.text()
        assert response.status == status and "timeout of" in text and '"deadline"' in text, text[-500:]
