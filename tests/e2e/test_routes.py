"""A pair of real processes over NIXL whose workers serve alone, too: all routes give the same tokens, and each takes over from the others."""

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import session
from tests.e2e.cluster import Started, tandem
from tests.e2e.settings import settings
from tools.family import family

FLAGS = (
    *("--stream", "threaded", "--log-level", "warning", "--device", "cpu"),
    *("--max-total-tokens", "4096", "--page-size", "8", "--num-threads", "1", "--port", "0"),
)
NEW = 150
SIZES = (4, 12, 200, 400) * 2  # of prompts


@dataclass
class Routed:
    """`later`: a decode worker that the router does not know yet."""

    router: str
    prefill: Started
    decode: Started
    later: Started


@pytest.fixture
def routed(qwen3: str, temp: Path) -> Iterator[Routed]:
    modes = {"p": "prefill", "d0": "decode", "d1": "decode"}
    env = settings(stream_delay_s=0.02)
    with (
        ThreadPoolExecutor(len(modes)) as pool,
        ExitStack() as stack,
    ):  # a process ends with the thread that is its parent

        def serve(name: str) -> Started:
            own = ("--disaggregation-bootstrap-port", "0") if modes[name] == "prefill" else ()
            role = ("--disaggregation-mode", modes[name], *own)
            worker = tandem(temp / name, "serve", "--model-path", qwen3, *FLAGS, *role, env=env)
            started = worker.__enter__()
            stack.push(worker)
            return started

        prefill, decode, spare = pool.map(serve, modes)
        members = (
            "--prefill",
            prefill.url,
            "--decode",
            decode.url,
            "--route",
            "auto",
            "--health-check-interval-secs",
            "0.2",
        )
        router = stack.enter_context(tandem(temp / "r", "router", "--port", "0", *members))
        yield Routed(router.url, prefill, decode, spare)


async def stream(http: aiohttp.ClientSession, url: str, size: int, events: list[Any]) -> list[int]:
    """The tokens of an answer; `events` receives each event as it comes."""
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    ids = [7 + (3 * i + size) % 90 for i in range(size)]
    async with http.post(
        f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling, "stream": True}
    ) as got:
        assert got.status == 200, await got.text()
        async for line in got.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
    return list(events[-1].get("output_ids", events[-1:]))


async def load(http: aiohttp.ClientSession, url: str, came: list[list[Any]]) -> list[list[int]]:
    return await asyncio.gather(*(stream(http, url, size, events) for size, events in zip(SIZES, came, strict=True)))


async def begun(http: aiohttp.ClientSession, url: str) -> tuple["asyncio.Future[list[list[int]]]", list[list[Any]]]:
    """A load of which each stream has some tokens."""
    came: list[list[Any]] = [[] for _ in SIZES]
    running = asyncio.ensure_future(load(http, url, came))
    while min(map(len, came)) < 4 and not running.done():
        await asyncio.sleep(0.005)
    assert not any("output_ids" in events[-1] and len(events[-1]["output_ids"]) == NEW for events in came)
    return running, came


async def join(http: aiohttp.ClientSession, router: str, worker: Started, role: str) -> None:
    """Have the router take in a worker, and wait until it may be chosen."""
    async with http.post(f"{router}/workers", json={"url": worker.url, "role": role}) as added:
        assert added.status == 201, await added.text()
    while True:
        async with http.get(f"{router}/workers") as response:
            listed = (await response.json())["workers"]
        if next(one for one in listed if one["url"] == worker.url)["is_healthy"]:
            return
        await asyncio.sleep(0.02)


def kill(worker: Started) -> None:
    for process in reversed(family(worker.process.pid)):
        process.send_signal(signal.SIGKILL)


async def routes_of(http: aiohttp.ClientSession, router: str) -> set[str]:
    async with http.post(f"{router}/traces", json={"last": 100}) as response:
        records = (await response.json())["records"]
    return {one["attributes"]["tandem.route"] for one in records if "tandem.route" in one["attributes"]}


async def test_all_routes_give_the_same_tokens_and_take_over_each_other_s_streams(routed: Routed) -> None:
    """Prefill alone takes over when decode is lost, and a decode worker that joins, when prefill is."""
    async with session() as http:
        right = await load(http, routed.later.url, [[] for _ in SIZES])
        assert len({tuple(tokens) for tokens in right}) == len(SIZES) // 2
        assert await load(http, routed.router, [[] for _ in SIZES]) == right
        assert len(await routes_of(http, routed.router)) > 1
        running, _ = await begun(http, routed.router)
        kill(routed.decode)
        assert await running == right, "prefill serves alone"
        running, _ = await begun(http, routed.router)
        await join(http, routed.router, routed.later, "decode")
        kill(routed.prefill)
        assert await running == right, "decode serves alone"
        assert await load(http, routed.router, [[] for _ in SIZES]) == right
