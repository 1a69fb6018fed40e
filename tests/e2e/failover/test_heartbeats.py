"""Idle workers freeze, each by another of its processes: the router knows before a request comes. Real processes and sockets."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.client import session
from tests.e2e.cluster import POLL_S, Started, child_of, several, tandem

SERVE = ("--max-total-tokens", "2048", "--num-threads", "1", "--log-level", "warning", "--device", "cpu")
FLAGS: dict[str, tuple[str, ...]] = {
    "scheduler": (),
    "main frontend": (),
    "other frontend": ("--tokenizer-worker-num", "2"),
    "follower": ("--tp-size", "2"),
    "none": (),
}
BODY = {"input_ids": [20, 21, 22], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


@dataclass
class Fleet:
    router: str
    workers: dict[str, Started]

    def process(self, name: str) -> psutil.Process:
        """The one of that worker which a test freezes."""
        worker = self.workers[name]
        match name:
            case "scheduler":
                return worker.child("scheduler")
            case "other frontend":
                return worker.child("frontend_process")
            case "follower":
                return child_of(worker.child("scheduler").pid, "rank_process")
            case _:
                return psutil.Process(worker.process.pid)


@pytest.fixture
def fleet(qwen3: str, temp: Path) -> Iterator[Fleet]:
    """No check comes within the test."""
    commands = {name: ("serve", "--port", "0", "--model-path", qwen3, *SERVE, *more) for name, more in FLAGS.items()}
    with several(temp, commands) as workers:
        urls = [worker.url for worker in workers.values()]
        flags = ("--health-check-interval-secs", "3600", "--policy", "round_robin", "--worker-urls", *urls)
        with tandem(temp / "r", "router", "--port", "0", *flags) as router:
            yield Fleet(router.url, workers)


@pytest.mark.slow
async def test_a_worker_that_freezes_while_it_is_idle_gets_no_request_until_it_wakes(fleet: Fleet) -> None:
    names = {worker.url: name for name, worker in fleet.workers.items()}
    frozen = {name: fleet.process(name) for name in FLAGS if name != "none"}
    assert await used(fleet, names) == set(FLAGS)
    await until_said(fleet, names, "heartbeats", set(FLAGS))
    for process in frozen.values():
        process.send_signal(signal.SIGSTOP)
    try:
        await until_said(fleet, names, "silent", set(frozen))
        assert await used(fleet, names) == {"none"}
    finally:
        for process in frozen.values():
            process.send_signal(signal.SIGCONT)
    await until_said(fleet, names, "silent", set())
    assert await used(fleet, names) == set(FLAGS)


async def used(fleet: Fleet, names: dict[str, str]) -> set[str]:
    """The workers that answer as many requests as there are workers."""
    before = await known(fleet)
    async with session() as http:
        for _ in names:
            async with http.post(f"{fleet.router}/generate", json=BODY) as response:
                assert response.status == 200, await response.text()
    after = await known(fleet)
    return {names[url] for url in names if after[url]["assigned_total"] > before[url]["assigned_total"]}


async def until_said(fleet: Fleet, names: dict[str, str], what: str, expected: set[str]) -> None:
    """Until the router says `what` of these workers alone."""
    async with asyncio.timeout(60):
        while {names[url] for url, one in (await known(fleet)).items() if one[what]} != expected:
            await asyncio.sleep(POLL_S)


async def known(fleet: Fleet) -> dict[str, dict[str, Any]]:
    async with session() as http, http.get(f"{fleet.router}/workers") as response:
        return {one["url"]: one for one in (await response.json())["workers"]}
