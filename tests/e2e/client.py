"""What a test says to a cluster: native and OpenAI requests over real HTTP, and the question whether memory is back."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from tests.e2e.cluster import POLL_S, SETTLE_S, Cluster

TIMEOUT = aiohttp.ClientTimeout(total=120)


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0))


async def generate(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One native request, streaming or not; the complete answer."""
    async with http.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            return await response.json()  # type: ignore[no-any-return]
        return await last_event(response)


async def last_event(stream: aiohttp.ClientResponse) -> dict[str, Any]:
    """Read to the end; no event is an error."""
    last: dict[str, Any] = {}
    async for line in stream.content:
        if line.startswith(b"data: {"):
            last = json.loads(line[6:])
            assert "error" not in last, last
    return last


async def generate_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    async with session() as http:
        return await asyncio.gather(*(generate(http, url, body) for body in bodies))


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer."""
    async with http.post(url, json=body) as response:
        return response.status, json.loads(await response.read() or b"{}")


async def text_of(url: str) -> str:
    """The body of a GET that must succeed."""
    async with session() as http, http.get(url) as response:
        assert response.status == 200
        return await response.text()


async def state_of(url: str) -> dict[str, Any]:
    """What a worker's /check says."""
    return json.loads(await text_of(f"{url}/check"))  # type: ignore[no-any-return]


async def wait_for_state(
    url: str, is_so: Callable[[dict[str, Any]], bool], *, every_s: float = POLL_S, within_s: float = SETTLE_S
) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so(state := await state_of(url)):
        assert time.monotonic() < deadline_s, state
        await asyncio.sleep(every_s)


async def assert_state_stays(url: str, is_so: Callable[[dict[str, Any]], bool], *, for_s: float) -> None:
    """Look again and again: nothing changes within the time."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        assert is_so(state := await state_of(url)), state
        await asyncio.sleep(1.0)


async def assert_all_back(cluster: Cluster) -> None:
    """Every page, row and room of every worker is back within a deadline, and every owner's `check()` passes."""
    for worker in cluster.workers:
        deadline_s = time.monotonic() + SETTLE_S
        while (left := left_over(state := await state_of(worker.url))) is not None:
            assert time.monotonic() < deadline_s, f"{worker.role}: {left}: {state}"
            await asyncio.sleep(POLL_S)


def left_over(state: dict[str, Any]) -> str | None:
    if not state["ok"]:
        return f"problems: {state['problems']}"
    if state["running"] or any(state["queues"].values()) or state["gauges"]["live"]:
        return "requests are left"
    if state["pages"]["held"] or state["pages"]["quarantined"]:
        return "pages are left"
    if state["counters"].get("rooms", 0) or state["counters"].get("exposed_rooms", 0):
        return "rooms are left"
    return None
