"""Drains with real processes, NIXL and the shipped model: requests that run when a worker leaves, or its role, end right."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.e2e.client import assert_all_back, session
from tests.e2e.cluster import SHIPPED, Cluster, cluster, wait_until
from tests.e2e.leftovers import Leftovers
from tests.e2e.roles import move, num_served, server_info, streams
from tests.e2e.test_cluster_life import BOUNDED_S, start_load

NUM_REQUESTS = 8
NEW_TOKENS = 150
SWITCHES_S = 120.0  # for two, each with the start of a worker


@pytest.fixture(scope="module")
def temp() -> Iterator[Path]:
    """What the cluster's processes call the temporary directory (short: unix socket paths are)."""
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def two_pairs(temp: Path) -> Iterator[Cluster]:
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(temp))
    extra = (
        "--prefill=2",
        "--decode=2",
        "--health-check-interval-secs=0.2",
        "--drain-timeout=60",
        "--disaggregation-kv-checksum",
    )
    with cluster(temp / "up", "--run-dir", str(temp / "logs"), *extra, *SHIPPED) as c:
        patch.undo()
        yield c


async def test_a_prefill_worker_becomes_decode_and_comes_back_under_load(two_pairs: Cluster, temp: Path) -> None:
    """Nothing is lost, every token is right, and it serves in each role."""
    mover = two_pairs.of("prefill")[0]
    async with asyncio.timeout(SWITCHES_S):
        async with session() as http, streams(two_pairs.router, num_clients=2, rest_s=0.1) as more:
            for role in ("decode", "prefill"):
                await more()
                told = await move(http, two_pairs, mover, role)
                assert (told["role"], told["health"], told["switching_to"]) == (role, "up", None)
                info = server_info(mover)
                assert info["disaggregation_mode"] == role and info["last_switch"]["to"] == role
                await more()
                assert num_served(mover, role) > 0
            assert told["bootstrap_port"] == info["disaggregation_bootstrap_port"]
    await assert_all_back(two_pairs)
    assert "Traceback" not in (temp / "logs" / "prefill-0.log").read_text()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "missing required field `role`"),
        ({"role": "null"}, 400, "role: must be prefill or decode, got 'null'"),
        ({"role": "prefill", "timeout": -1}, 400, "timeout: must be a number of seconds, at least 0"),
        ({"role": "prefill", "timeout": "1"}, 400, "timeout: "),
        ({"role": "prefill"}, 400, "role: this worker cannot be a prefill worker: --disaggregation-bootstrap-port"),
        ({"role": "decode"}, 200, "this is a decode worker"),
    ],
)
def test_what_cannot_be_changes_nothing(two_pairs: Cluster, body: dict[str, Any], status: int, says: str) -> None:
    """Another process listens at the port that its bootstrap server would have."""
    worker = two_pairs.of("decode")[0]
    lived = httpx.get(f"{worker.url}/health").json()["incarnation"]
    with socket.create_server(("127.0.0.1", server_info(worker)["disaggregation_bootstrap_port"])):
        answer = httpx.post(f"{worker.url}/switch_role", json=body)
    assert answer.status_code == status and says in answer.text
    health = httpx.get(f"{worker.url}/health")
    assert health.status_code == 200 and health.json()["incarnation"] == lived


async def test_no_request_notices_that_workers_leave(two_pairs: Cluster, temp: Path) -> None:
    """A prefill and a decode worker get SIGTERM while requests run, and more come: all end right, and both with 0."""
    leaving = [two_pairs.of(role)[0] for role in ("prefill", "decode")]
    load = await start_load(two_pairs.router, count=NUM_REQUESTS, new_tokens=NEW_TOKENS)
    for worker in leaving:
        os.kill(worker.pid, signal.SIGTERM)
    more = await start_load(two_pairs.router, count=NUM_REQUESTS, new_tokens=NEW_TOKENS)
    for requests in (load, more):
        assert await asyncio.wait_for(requests, BOUNDED_S) == ["right"] * NUM_REQUESTS
    said = [f"{role}-0 ended (exit status 0)" for role in ("prefill", "decode")]
    wait_until(
        lambda: all(text in two_pairs.log.read_text() for text in said),
        within_s=BOUNDED_S,
        what=two_pairs.log.read_text,
    )
    for name in ("prefill-0", "decode-0"):
        assert "Traceback" not in (temp / "logs" / f"{name}.log").read_text()
    stay = tuple(w for w in two_pairs.workers if w not in leaving)
    await assert_all_back(Cluster(two_pairs.router, stay, two_pairs.launcher, two_pairs.log))


def test_every_page_that_nixl_moved_had_its_checksum_compared(two_pairs: Cluster) -> None:
    """(The requests of the test before.)"""
    decode = two_pairs.of("decode")[1]
    counters = httpx.get(f"{decode.url}/check").json()["counters"]
    assert counters["kv_checksum_verified"] > 0 == counters["kv_checksum_failed"]


async def test_sigterm_to_tandem_up_lets_every_request_end(two_pairs: Cluster, temp: Path) -> None:
    """As a service manager sends it: to every process. Requests of the router need the workers; nothing is left behind."""
    traces, before = Leftovers(two_pairs.launcher.pid, temp), num_taken(two_pairs.router)
    load = await start_load(two_pairs.router, count=NUM_REQUESTS, new_tokens=NEW_TOKENS)
    await asyncio.to_thread(  # the first may have a token before the router has seen the last
        wait_until,
        lambda: num_taken(two_pairs.router) == before + NUM_REQUESTS,
        within_s=BOUNDED_S,
        what="the router has taken all requests",
    )
    for process in traces.family:
        process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(load, BOUNDED_S) == ["right"] * NUM_REQUESTS
    assert await asyncio.to_thread(two_pairs.launcher.wait, BOUNDED_S) == 0
    assert traces.left() == []


def num_taken(router: str) -> float:
    """The requests that it serves or has answered."""
    lines = httpx.get(f"{router}/metrics").text.splitlines()
    counts = ("tandem_router_inflight_requests ", 'tandem_router_requests_total{path="/generate"')
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counts))
