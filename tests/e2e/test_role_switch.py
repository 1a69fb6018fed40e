"""A worker changes its role and changes back while streams run: real processes, NIXL and the shipped model."""

import asyncio
import random
import re
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx2 as httpx
import pytest

from engine.model_config import DEFAULT_MODEL_PATH
from tests.e2e.client import assert_all_back, generate, session
from tests.e2e.cluster import POLL_S, Cluster, Worker, cluster, tandem, wait_until
from tests.e2e.conftest import SHIPPED
from tests.e2e.workload import recall_body

BOUNDED_S = 60.0
NUM_CLIENTS = 4
NEW_TOKENS = 12
ENOUGH = 3  # answers of each client between two switches


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("roles")
    fast = ("--health-check-interval-s=0.2", "--load-poll-interval-s=0.2", "--drain-timeout=60")
    with cluster(folder, "--prefill=2", "--decode=1", "--run-dir", str(folder / "logs"), *fast, *SHIPPED) as c:
        yield c


def test_a_prefill_worker_becomes_decode_and_comes_back_under_load(up: Cluster) -> None:
    """Nothing is lost, every token is right, and it serves in each role."""
    mover = up.of("prefill")[0]

    async def there_and_back() -> None:
        async with session() as http, streams(up.router) as more:
            for role in ("decode", "prefill"):
                await more()
                told = await move(http, up, mover, role)
                assert (told["role"], told["health"], told["switching_to"]) == (role, "up", None)
                info = server_info(mover)
                assert info["disaggregation_mode"] == role and info["last_switch"]["to"] == role
                await more()
                assert num_served(mover, role) > 0
            assert told["bootstrap_port"] == info["disaggregation_bootstrap_port"]

    asyncio.run(asyncio.wait_for(there_and_back(), BOUNDED_S))
    asyncio.run(assert_all_back(up))
    assert "Traceback" not in (up.log.parent / "logs" / "prefill-0.log").read_text()


@asynccontextmanager
async def streams(url: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Clients that stream one answer after another, each checked. Yields what waits until each has had some more."""
    stop, counts = asyncio.Event(), [0] * NUM_CLIENTS

    async def client(http: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            body, expected = recall_body(rng, 120, max_new_tokens=NEW_TOKENS)
            answer = await generate(http, url, {**body, "stream": True})
            assert answer["output_ids"] == expected
            counts[number] += 1

    async def more() -> None:
        wanted = [count + ENOUGH for count in counts]
        while any(count < want for count, want in zip(counts, wanted, strict=True)):
            for failed in [task for task in tasks if task.done()]:
                failed.result()
            await asyncio.sleep(POLL_S)

    async with session() as http:
        tasks = [asyncio.create_task(client(http, number)) for number in range(NUM_CLIENTS)]
        try:
            yield more
        finally:
            stop.set()
            await asyncio.gather(*tasks)


def num_served(worker: Worker, role: str) -> float:
    """Requests of this life of the worker, counted under its role."""
    text = httpx.get(f"{worker.url}/metrics").text
    return sum(float(n) for n in re.findall(rf'^sglang:num_requests_total{{[^}}]*"{role}"[^}}]*}} (\S+)$', text, re.M))


def server_info(worker: Worker) -> dict[str, Any]:
    return httpx.get(f"{worker.url}/server_info").json()  # type: ignore[no-any-return]


async def move(http: aiohttp.ClientSession, up: Cluster, worker: Worker, role: str) -> dict[str, Any]:
    async with http.post(f"{up.router}/workers/role", json={"url": worker.url, "role": role}) as response:
        said = await response.json()
        assert response.status == 200, said
        return said  # type: ignore[no-any-return]


# ---- one worker by itself


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
def test_what_cannot_be_changes_nothing(up: Cluster, body: dict[str, Any], status: int, says: str) -> None:
    """Somebody else listens at the port that its bootstrap server would have."""
    worker = up.of("decode")[0]
    lived = httpx.get(f"{worker.url}/health").json()["incarnation"]
    with socket.create_server(("127.0.0.1", server_info(worker)["disaggregation_bootstrap_port"])):
        answer = httpx.post(f"{worker.url}/switch_role", json=body)
    assert answer.status_code == status and says in answer.text
    health = httpx.get(f"{worker.url}/health")
    assert health.status_code == 200 and health.json()["incarnation"] == lived


def test_a_role_that_does_not_start_is_left_again_and_sigterm_ends_a_switch(tmp_path: Path) -> None:
    """Only prefill opens the folder of prefixes, so nobody can tell before that it is none. Weights stay the last ones."""
    no_folder, weights = tmp_path / "no-folder", tmp_path / "weights"
    no_folder.touch()
    shutil.copytree(DEFAULT_MODEL_PATH, weights)
    broken = ("--enable-hierarchical-cache", "--hicache-storage-backend=file", f"--hicache-storage-dir={no_folder}")
    args = ("--disaggregation-mode=decode", "--port=0", "--disaggregation-bootstrap-port=0")
    with tandem(tmp_path / "worker", "serve", *args, *broken, *SHIPPED) as worker:
        with httpx.Client(base_url=worker.url) as http:
            update = {"model_path": str(weights), "weight_version": "7"}
            assert http.post("/update_weights_from_disk", json=update).status_code == 200
            lived = http.get("/health").json()["incarnation"]
            told = http.post("/switch_role", json={"role": "prefill"})
            assert told.status_code == 202 and told.json()["incarnation"] == lived
            again = http.post("/switch_role", json={"role": "prefill"})
            assert again.status_code == 409 and again.json()["error"]["code"] == "switching"

        def is_back() -> bool:
            assert httpx.get(f"{worker.url}/liveness").status_code == 200, "nobody may take it for dead"
            return httpx.get(f"{worker.url}/health").status_code == 200

        wait_until(lambda: not is_back(), within_s=BOUNDED_S, what="it drains")
        wait_until(is_back, within_s=BOUNDED_S, what=worker.log.read_text)
        info = httpx.get(f"{worker.url}/server_info").json()
        assert info["disaggregation_mode"] == "decode" and "the scheduler process ended" in info["last_switch"]["error"]
        assert (info["model_path"], info["weight_version"], info["served_model_name"]) == (str(weights), "7", "recall")
        assert httpx.get(f"{worker.url}/health").json()["incarnation"] != lived
        assert f"--hicache-storage-dir {no_folder}" in worker.log.read_text()

        assert httpx.post(f"{worker.url}/switch_role", json={"role": "prefill"}).status_code == 202
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(BOUNDED_S) == 0
    assert "Traceback" not in worker.log.read_text()
