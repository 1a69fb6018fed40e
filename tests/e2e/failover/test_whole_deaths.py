"""Workers that serve whole requests, one of which is killed: its client hears of it, and the other worker serves on."""

import asyncio
import dataclasses
import random
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, generate, session, wait_for_state
from tests.e2e.cluster import DEAD, SHIPPED, child_of, cluster
from tests.e2e.workload import recall_body


@pytest.mark.parametrize("dies", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_a_dead_worker_costs_its_own_requests_alone(tmp_path: Path, dies: str) -> None:
    """The fake backend: nothing here is transferred."""
    lives = "decode" if dies == "prefill" else "prefill"
    with cluster(tmp_path, "--transfer-backend", "fake", *SHIPPED, DEAD) as pd:
        (victim,), (other,) = pd.of(dies), pd.of(lives)
        body, wanted = recall_body(random.Random(2), 60, max_new_tokens=8)
        endless = {**body, "stream": True, "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        async with session() as http:
            request = asyncio.create_task(generate(http, victim.url, endless))
            await wait_for_state(victim.url, lambda state: state["running"] == 1)
            child_of(victim.pid, "scheduler").kill()
            with pytest.raises((AssertionError, aiohttp.ClientError)):
                await request
            assert (await generate(http, other.url, body))["output_ids"] == wanted
        await assert_all_back(dataclasses.replace(pd, workers=(other,)))
