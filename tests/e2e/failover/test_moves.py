"""Streams move from one decode worker to another with their KV, and no client sees it: real processes and engines."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.client import session
from tests.e2e.cluster import Started, several, tandem
from tests.e2e.failover.test_failover import BODIES, DELAY_S, KV, SLOW, busy, filled_in, shown, streams
from tests.e2e.settings import settings

# Hidden states of all tokens are shown at every event: prefill computes them again.
MOVING = {name: (path, body) for name, (path, body) in BODIES.items() if not body.get("return_hidden_states")}
PROMPTS = "sglang:prompt_tokens_total"
MOVE_AFTER = 20  # events; a busy machine reads them late, and the rest must outlast the request to move


@dataclass
class Fleet:
    router: str
    prefill: Started
    answering: list[Started]
    moves: "tuple[Move, ...]"


@pytest.fixture(params=["nixl", "mooncake", "nixl, TP 2"])
def fleet(request: pytest.FixtureRequest, qwen3: str, temp: Path) -> Iterator[Fleet]:
    backend, _, tp = request.param.partition(", TP ")
    ways = MOVES[backend]
    serve = ("serve", "--port", "0", "--model-path", qwen3, *SLOW, *KV, "--tp-size", tp or "1", "--drain-timeout", "60")
    serve += ("--disaggregation-transfer-backend", backend, "--disaggregation-kv-checksum")
    serve += ("--disaggregation-bootstrap-port", "0", "--disaggregation-mode")
    commands = {"p": (*serve, "prefill"), **{f"d{i}": (*serve, "decode") for i in range(2 + ways.count(drain))}}
    with several(temp, commands, settings(stream_delay_s=DELAY_S)) as workers:
        prefill, *answering = workers.values()
        route = ("--prefill", prefill.url, *(word for worker in answering for word in ("--decode", worker.url)))
        with tandem(temp / "r", "router", "--port", "0", "--pd-disaggregation", *route) as router:
            yield Fleet(router.url, prefill, answering, ways)


async def metric(url: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples with this label."""
    async with session() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    samples = re.findall(rf"^{name}\{{.*{label}.*\}} ([\d.e+]+)", text, re.MULTILINE)
    return sum(map(float, samples))


async def moves(fleet: Fleet, result: str = "moved") -> float:
    """Answers that have left a worker, by what became of them."""
    return await metric(fleet.router, "tandem_router_failovers_total", f'result="{result}"')


async def migrate(fleet: Fleet, worker: Started) -> None:
    async with session() as http, http.post(f"{fleet.router}/workers/migrate", json={"url": worker.url}) as response:
        assert response.status == 200, await response.text()


async def switch(fleet: Fleet, worker: Started) -> None:
    body = {"url": worker.url, "role": "prefill"}
    async with session() as http, http.post(f"{fleet.router}/workers/role", json=body) as response:
        assert response.status == 200, await response.text()


async def drain(fleet: Fleet, worker: Started) -> None:
    worker.process.terminate()
    fleet.answering.remove(worker)
    await asyncio.to_thread(worker.process.wait, 30)


Move = Callable[[Fleet, Started], Awaitable[None]]
MOVES: dict[str, tuple[Move, ...]] = {"nixl": (migrate, migrate, drain, switch), "mooncake": (migrate, drain)}


@pytest.mark.slow  # `make test` moves them in simulated clusters, and between roles in tests/disagg/test_moving.py
async def test_streams_move_with_their_kv(fleet: Fleet) -> None:
    """There and back, and when their worker changes its role or drains: prefill computes nothing, and tokens are the same."""
    warmed_up = await metric(fleet.prefill.url, PROMPTS)
    right = [shown(events) for events in await streams(fleet.router, [0] * len(MOVING), MOVING)]
    written = await filled_in(fleet.router)
    prompts = await metric(fleet.prefill.url, PROMPTS) - warmed_up
    for move in fleet.moves:
        counts = [0] * len(MOVING)
        before, moved = await metric(fleet.prefill.url, PROMPTS), await moves(fleet)
        load = asyncio.ensure_future(asyncio.gather(streams(fleet.router, counts, MOVING), filled_in(fleet.router)))
        while min(counts) < MOVE_AFTER and not load.done():
            await asyncio.sleep(0.005)
        left = busy(fleet)
        await move(fleet, left)
        events, text = await load
        assert ([shown(one) for one in events], text) == (right, written), move.__name__
        assert await metric(fleet.prefill.url, PROMPTS) == before + prompts, "prefill took part"
        assert await moves(fleet) > moved and not await moves(fleet, "(?:ended|went_on)")
