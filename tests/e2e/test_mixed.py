"""A mixed pool of real processes over NIXL: both ways give the same tokens, and each takes over what the other loses."""

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
class Mixed:
    """`later`: a unified and a decode worker that the router does not know yet."""

    router: str
    decode: Started
    later: dict[str, Started]


@pytest.fixture
def mixed(qwen3: str, temp: Path) -> Iterator[Mixed]:
    modes = {"p": "prefill", "d0": "decode", "u": "null", "d1": "decode"}
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

        prefill, decode, alone, spare = pool.map(serve, modes)
        members = ("--prefill", prefill.url, "--decode", decode.url, "--mixed")
        router = stack.enter_context(tandem(temp / "r", "router", "--port", "0", *members))
        yield Mixed(router.url, decode, {"unified": alone, "decode": spare})


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


async def test_both_ways_give_the_same_tokens_and_take_over_each_other_s_streams(mixed: Mixed) -> None:
    """At first there is a pair alone; a unified worker joins, and takes over when decode is lost; and the other way round."""
    async with session() as http:
        right = await load(http, mixed.later["unified"].url, [[] for _ in SIZES])
        assert len({tuple(tokens) for tokens in right}) == len(SIZES) // 2
        serving = mixed.decode
        for role, joins in mixed.later.items():
            came: list[list[Any]] = [[] for _ in SIZES]
            running = asyncio.ensure_future(load(http, mixed.router, came))
            while min(map(len, came)) < 4 and not running.done():
                await asyncio.sleep(0.005)
            await join(http, mixed.router, joins, role)
            assert not any("output_ids" in events[-1] and len(events[-1]["output_ids"]) == NEW for events in came)
            kill(serving)
            assert await running == right, role
            serving = joins
        assert await load(http, mixed.router, [[] for _ in SIZES]) == right
