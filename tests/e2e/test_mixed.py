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
import psutil
import pytest

from tests.e2e.client import session
from tests.e2e.cluster import Started, tandem

FLAGS = (
    *("--stream", "threaded", "--stream-delay", "0.02", "--log-level", "warning", "--device", "cpu"),
    *("--max-total-tokens", "4096", "--page-size", "8", "--num-threads", "1", "--port", "0"),
)
NEW = 60
SIZES = (4, 12, 200, 400) * 2  # of prompts


@dataclass
class Mixed:
    router: str
    decode: Started
    alone: list[Started]  # the router knows the first


@pytest.fixture
def mixed(qwen3: str, temp: Path) -> Iterator[Mixed]:
    modes = {"p": "prefill", "d": "decode", "u0": "null", "u1": "null"}
    with (
        ThreadPoolExecutor(len(modes)) as pool,
        ExitStack() as stack,
    ):  # a process ends with the thread that is its parent

        def serve(name: str) -> Started:
            own = ("--disaggregation-bootstrap-port", "0") if modes[name] == "prefill" else ()
            role = ("--disaggregation-mode", modes[name], *own)
            worker = tandem(temp / name, "serve", "--model-path", qwen3, *FLAGS, *role)
            started = worker.__enter__()
            stack.push(worker)
            return started

        prefill, decode, *alone = pool.map(serve, modes)
        members = ("--prefill", prefill.url, "--decode", decode.url, "--mixed", "--worker-urls", alone[0].url)
        router = stack.enter_context(tandem(temp / "r", "router", "--port", "0", *members))
        yield Mixed(router.url, decode, alone)


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


async def workers(http: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    """The last of each role."""
    async with http.get(f"{url}/workers") as response:
        return {worker["role"]: worker for worker in (await response.json())["workers"]}


def kill(worker: Started) -> None:
    leader = psutil.Process(worker.process.pid)
    for process in (*leader.children(recursive=True), leader):
        process.send_signal(signal.SIGKILL)


async def test_both_ways_give_the_same_tokens_and_take_over_each_other_s_streams(mixed: Mixed) -> None:
    async with session() as http:
        right = await load(http, mixed.alone[1].url, [[] for _ in SIZES])
        assert len({tuple(tokens) for tokens in right}) == len(SIZES) // 2
        for _ in range(3):  # what each way takes is known then
            assert await load(http, mixed.router, [[] for _ in SIZES]) == right
        before = await workers(http, mixed.router)
        assert all(before[role]["assigned_total"] >= 3 for role in ("prefill", "decode", "unified")), before

        for lost, role in ((mixed.alone[0], "unified"), (mixed.decode, "decode")):
            came: list[list[Any]] = [[] for _ in SIZES]
            running = asyncio.ensure_future(load(http, mixed.router, came))
            while min(map(len, came)) < 4 and not running.done():
                await asyncio.sleep(0.005)
            assert (await workers(http, mixed.router))[role]["inflight_requests"] > 0, "nothing is lost with it"
            kill(lost)
            assert await running == right, role
            if role == "unified":
                async with http.post(
                    f"{mixed.router}/workers", json={"url": mixed.alone[1].url, "role": role}
                ) as added:
                    assert added.status == 201
                while not (await workers(http, mixed.router))[role]["is_healthy"]:
                    await asyncio.sleep(0.02)
        assert await load(http, mixed.router, [[] for _ in SIZES]) == right
