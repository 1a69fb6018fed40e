"""Death and return of real processes: every request ends, survivors are clean, and nothing is left behind."""

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx2 as httpx
import psutil
import pytest

from deploy.launcher.ports import free_ports
from tests.e2e.client import assert_all_back, generate_all, session
from tests.e2e.cluster import SHIPPED, Cluster, Started, Worker, cluster, tandem, wait_until
from tests.e2e.leftovers import Leftovers
from tests.e2e.workload import recall_body
from tools.recall.oracle import continuation

BOUNDED_S = 60.0
GONE_S = 60.0
NUM_REQUESTS = 48
FAST = (
    "--disaggregation-heartbeat-interval=0.3",
    "--disaggregation-drain-timeout=3",
    "--disaggregation-handshake-timeout=5",
)


@pytest.fixture
def temp() -> Iterator[Path]:
    """What the cluster's processes call the temporary directory (short: unix socket paths are)."""
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def up_in(temp: Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> Iterator[Cluster]:
    monkeypatch.setenv("TMPDIR", str(temp))
    with cluster(temp / "up", "--run-dir", str(temp / "logs"), *args, *SHIPPED) as c:
        yield c


def test_kill_9_of_the_launcher_leaves_nothing(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process (the guard, which leads a session of its own, ends too), no directory of sockets, no segment of shared
    memory: under load, after a transfer."""
    with up_in(temp, monkeypatch) as c:

        async def kill_under_load() -> tuple[list[str], Leftovers]:
            load = await start_load(c.router, count=8, new_tokens=20_000)
            traces = Leftovers(c.launcher.pid, temp)
            c.launcher.kill()
            return await load, traces

        ends, traces = asyncio.run(kill_under_load())
        c.launcher.wait()
        assert set(ends) == {"cut"}
        traces.assert_gone(within_s=GONE_S)


def test_kill_9_of_one_child_after_the_other_leaves_nothing(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router, a worker as a whole, and a child of a worker: of each nothing stays, while the others go on; the last
    takes the launcher with it."""
    with up_in(temp, monkeypatch) as c:

        async def kill_under_load() -> list[str]:
            load = await start_load(c.router, count=8, new_tokens=20_000)
            whole = Leftovers(c.launcher.pid, temp)
            (router,) = [p for p in whole.family if "router" in p.cmdline()]
            prefill, decode = (Leftovers(c.of(role)[0].pid, temp) for role in ("prefill", "decode"))
            for traces, victim in (
                (Leftovers(router.pid, temp), router),
                (prefill, prefill.family[0]),
                (decode, child(decode, "scheduler")),
            ):
                assert c.launcher.poll() is None
                victim.kill()
                await asyncio.to_thread(traces.assert_gone, within_s=BOUNDED_S)
            assert await asyncio.to_thread(c.launcher.wait, BOUNDED_S) == 1  # no process is left
            whole.assert_gone(within_s=GONE_S)
            return await load

        assert set(asyncio.run(kill_under_load())) == {"cut"}
        said = c.log.read_text()
        assert said.count("the others go on") == 3 and "no process is left" in said


def child(worker: Leftovers, word: str) -> psutil.Process:
    (found,) = [p for p in worker.family[1:] if any(word in part for part in p.cmdline())]
    return found


@dataclass
class Pair:
    """A prefill and a decode worker and a router in front, each started by hand."""

    folder: Path
    stack: contextlib.ExitStack
    ports: list[int]

    def start(self, name: str) -> Started:
        started = self.stack.enter_context(tandem(self.folder / name, *self._command(name)))
        setattr(self, name, started)
        return started

    def _command(self, name: str) -> list[str]:
        router, prefill, bootstrap, decode = self.ports
        if name == "router":
            ends = [f"--prefill=http://127.0.0.1:{prefill}", f"--decode=http://127.0.0.1:{decode}"]
            return [
                "router",
                "--pd-disaggregation",
                *ends,
                "--port",
                str(router),
                "--health-check-interval-secs",
                "0.2",
            ]
        own = (
            ["--port", str(prefill), "--disaggregation-bootstrap-port", str(bootstrap)]
            if name == "prefill"
            else ["--port", str(decode)]
        )
        return ["serve", "--disaggregation-mode", name, *own, *FAST, *SHIPPED]

    def get(self, name: str) -> Started:
        return getattr(self, name)  # type: ignore[no-any-return]

    def as_cluster(self) -> Cluster:
        workers = tuple(Worker(r, self.get(r).url, self.get(r).process.pid) for r in ("prefill", "decode"))
        router = self.get("router")
        return Cluster(router.url, workers, router.process, router.log)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Each test leaves it whole again."""
    with contextlib.ExitStack() as stack:
        pair = Pair(tmp_path_factory.mktemp("pair"), stack, free_ports(4))
        for name in ("prefill", "decode", "router"):
            pair.start(name)
        yield pair


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("prefill", "scheduler"),
        ("decode", "worker"),
        pytest.param("prefill", "worker", marks=pytest.mark.slow),
        pytest.param("decode", "scheduler", marks=pytest.mark.slow),
    ],
)
def test_a_worker_dies_and_comes_back_at_the_same_address(pair: Pair, name: str, victim: str) -> None:
    """Requests end, the survivor is clean without a restart, and the same router serves again."""
    survivor = "decode" if name == "prefill" else "prefill"

    async def kill_under_load() -> list[str]:
        load = await start_load(pair.get("router").url, count=NUM_REQUESTS, new_tokens=200)  # prompts still wait
        dead = pair.get(name)
        (dead.child("scheduler") if victim == "scheduler" else psutil.Process(dead.process.pid)).kill()
        ends = await asyncio.wait_for(load, BOUNDED_S)
        await asyncio.to_thread(dead.process.wait, BOUNDED_S)
        return ends

    children = psutil.Process(pair.get(name).process.pid).children(recursive=True)
    ends = asyncio.run(kill_under_load())
    assert len(ends) == NUM_REQUESTS and "error" in ends and set(ends) <= {"right", "error"}, ends
    assert not psutil.wait_procs(children, timeout=GONE_S)[1], "children outlive their worker"
    asyncio.run(assert_all_back(_alone(pair, survivor)))
    refused = httpx.post(f"{pair.get('router').url}/generate", json={"text": "k17"}, timeout=BOUNDED_S)
    assert refused.status_code in (502, 503) and name in refused.json()["error"]["message"]
    pair.start(name)
    router = pair.get("router").url
    wait_until(lambda: httpx.get(f"{router}/readiness").status_code == 200, within_s=BOUNDED_S, what="ready again")
    drawn = [recall_body(random.Random(i), 60, max_new_tokens=4) for i in range(8)]
    answers = asyncio.run(generate_all(router, [body for body, _ in drawn]))
    assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in drawn]
    asyncio.run(assert_all_back(pair.as_cluster()))


def _alone(pair: Pair, name: str) -> Cluster:
    whole = pair.as_cluster()
    return Cluster(whole.router, tuple(whole.of(name)), whole.launcher, whole.log)


async def start_load(url: str, *, count: int, new_tokens: int) -> "asyncio.Future[list[str]]":
    """Half of them streams; returns once the first tokens have come. The result: how each ended (see `_one`)."""
    begun = asyncio.Event()
    load = asyncio.gather(*(_one(url, i, new_tokens, begun) for i in range(count)))
    await asyncio.wait_for(begun.wait(), BOUNDED_S)
    return load


async def _one(url: str, i: int, new_tokens: int, begun: asyncio.Event) -> str:
    """ "right" or "wrong" (a whole answer), "error" (one that says what happened), "cut" (the connection broke)."""
    body, _ = recall_body(random.Random(i), 250)
    body["sampling_params"] |= {"max_new_tokens": new_tokens, "ignore_eos": True}
    try:
        async with session() as http, http.post(f"{url}/generate", json={**body, "stream": bool(i % 2)}) as response:
            if response.status != 200:
                return "error" if (await response.json())["error"]["message"] else "wrong"
            return await _read(response, body, new_tokens, begun)
    except (aiohttp.ClientError, ConnectionError):
        return "cut"


async def _read(response: aiohttp.ClientResponse, body: dict[str, Any], new_tokens: int, begun: asyncio.Event) -> str:
    whole = b""
    async for chunk in response.content.iter_any():
        begun.set()
        whole += chunk
    if b'"error"' in whole:
        return "error"
    last = whole.decode().strip().removesuffix("data: [DONE]").strip().rpartition("data: ")[2]
    ids = json.loads(last)["output_ids"]
    return (
        "right"
        if len(ids) == new_tokens and ids == continuation(body["input_ids"], new_tokens, ignore_eos=True)
        else "wrong"
    )
