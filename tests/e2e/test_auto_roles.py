"""`--auto-roles` with real workers: load that turns moves one of them, and back, and every token is right meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, session
from tests.e2e.cluster import SHIPPED, Cluster, cluster
from tests.e2e.roles import num_served, server_info, streams

BATCH = 4  # requests that a decode worker runs at a time
NUM_CLIENTS = 3 * BATCH  # more than two such workers take, and no more than three
MOVES_S = 280.0
FLAGS = (
    "--prefill=2",
    "--decode=2",
    f"--max-running-requests={BATCH}",
    "--health-check-interval-secs=0.2",
    "--load-poll-interval=0.2",
    "--auto-roles",
    "--auto-roles-interval=0.2",
    "--auto-roles-enter=0.6",
    "--auto-roles-leave=0.4",
    "--auto-roles-sustain=0.6",
    "--auto-roles-cooldown=1",
    "--auto-roles-switch-time=0.5",
    # Goals that no machine meets, so the load alone decides: tokens that come call decode short, prompts that wait prefill.
    "--auto-roles-itl=0.0005",
    "--auto-roles-ttft=0.02",
    "--auto-roles-min-decode=2",
)


@pytest.mark.slow
async def test_workers_follow_the_load_there_and_back(temp: Path) -> None:
    """Long answers fill the decode workers, so a prefill worker comes; then only prompts come, and one goes back."""
    with cluster(temp / "up", "--run-dir", str(temp / "logs"), *FLAGS, *SHIPPED) as up:
        async with asyncio.timeout(MOVES_S), session() as http:
            async with streams(up.router, num_clients=NUM_CLIENTS, new_tokens=60) as more:
                first = await until_moved(http, up, more, moves=1)
                assert (first["to_role"], first["result"]) == ("decode", "moved")
                assert "decode is short" in first["reason"]
                await serves(up, first, more)
                assert await roles(http, up) == {"prefill": 1, "decode": 3}
            async with streams(up.router, num_clients=2 * NUM_CLIENTS, num_pairs=250, new_tokens=1) as more:
                second = await until_moved(http, up, more, moves=2)
                assert (second["to_role"], second["result"]) == ("prefill", "moved")
                assert "prefill is short" in second["reason"]
                await serves(up, second, more)
                assert await roles(http, up) == {"prefill": 2, "decode": 2}
        await assert_all_back(up)
        for log in sorted((temp / "logs").glob("*.log")):
            assert "Traceback" not in log.read_text(), log


async def until_moved(
    http: aiohttp.ClientSession, up: Cluster, more: Callable[[], Awaitable[None]], *, moves: int
) -> dict[str, Any]:
    """The last of so many moves, when it is over; requests are answered right all the while."""
    while True:
        await more()
        async with http.get(f"{up.router}/auto_roles") as response:
            told = await response.json()
        over = [move for move in told["moves"] if move["result"] is not None]
        assert len(told["moves"]) <= moves, told
        if len(over) == moves:
            return over[0]  # type: ignore[no-any-return]


async def serves(up: Cluster, move: dict[str, Any], more: Callable[[], Awaitable[None]]) -> None:
    """The worker says that it has the role, and gets requests in it."""
    (worker,) = [worker for worker in up.workers if worker.url == move["url"]]
    assert server_info(worker)["disaggregation_mode"] == move["to_role"]
    while not num_served(worker, move["to_role"]):
        await more()


async def roles(http: aiohttp.ClientSession, up: Cluster) -> dict[str, int]:
    """How many workers the router has of each."""
    async with http.get(f"{up.router}/workers") as response:
        found = [worker["role"] for worker in (await response.json())["workers"]]
    return {role: found.count(role) for role in ("prefill", "decode")}
