"""`tandem router --workers N`: real processes on one port, dummy workers, a real HTTP client."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from router.fleet import DRAIN, END, signal_for
from tests.e2e.cluster import end_tree
from tests.router.behaviours import hang, obey
from tests.router.dummies import CHAT, DummyWorker, always, answer_ok, until
from tests.router.pool.kube_server import NAMESPACE, kube_server, pod
from tools.family import lives

DEADLINE_S = 60.0
PROCESSES = 2


@dataclass
class Fleet:
    """A router of several processes, each of which has answered."""

    url: str
    process: "subprocess.Popen[bytes]"
    decodes: list[DummyWorker]
    prefills: list[DummyWorker]
    children: list[psutil.Process] = field(default_factory=list)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Over a connection of its own: any of the processes may get it."""
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            session.request(method, self.url + path, json=body, headers=headers) as response,
        ):
            data = await response.read()
            return response.status, json.loads(data) if data[:1] in b"{[" else data.decode()

    def members(self) -> list[psutil.Process]:
        """The serving processes (multiprocessing has one of its own beside them)."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if _is_member(child)]


def _is_member(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def fleet(tmp_path: Path, *args: str, decode: int = 2) -> AsyncIterator[Fleet]:
    prefills = [DummyWorker("p0", "prefill", info={"disaggregation_bootstrap_port": 8998})]
    decodes = [DummyWorker(f"d{i}", "decode") for i in range(decode)]
    async with AsyncExitStack() as stack:
        for worker in (*prefills, *decodes):
            await worker.start()
            stack.push_async_callback(worker.stop)
        named = [word for worker in decodes for word in ("--decode", worker.url)]
        process, url = await launch(stack, tmp_path, "--prefill", prefills[0].url, *named, *args)
        running = Fleet(url, process, decodes, prefills)
        await until(lambda: len(running.members()) == PROCESSES)
        running.children = psutil.Process(process.pid).children()
        yield running


async def launch(stack: AsyncExitStack, tmp_path: Path, *args: str) -> "tuple[subprocess.Popen[bytes], str]":
    """A router that listens at the URL; it ends with `stack`."""
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "deploy", "router", "--port", "0", "--workers", str(PROCESSES)]
    process = subprocess.Popen([*argv, "--ready-file", str(ready), *args])
    stack.callback(end_tree, process)
    await until(lambda: ready.exists() or process.poll() is not None)
    assert process.poll() is None
    return process, json.loads(ready.read_text())["router"]


async def test_processes_share_the_load_the_pool_the_circuits_and_the_metrics(tmp_path: Path) -> None:
    # what they know they are told
    async with fleet(tmp_path, "--cb-failure-threshold", "1", "--health-check-interval-secs=600") as f:
        for _ in range(12):
            assert (await f.call("POST", "/v1/chat/completions", CHAT))[0] == 200
        traced = (await f.call("POST", "/traces", {"last": 12}))[1]["records"]  # whichever process served them
        assert len({record["request_id"] for record in traced}) == 12 == len(traced)
        shown = (await f.call("GET", "/dashboard/state"))[1]
        assert shown["router"]["processes"] == PROCESSES and len({record["key"] for record in shown["requests"]}) == 12
        one = (await f.call("GET", f"/dashboard/requests/{shown['requests'][0]['key']}"))[1]
        assert one["record"]["status"] == 200
        for record in shown["requests"][:4]:
            assert (await f.call("GET", f"/traces/{record['request_id']}"))[1]["record"]["key"] == record["key"]
        for worker in (*f.prefills, *f.decodes):
            worker.behave, worker.seen = hang, []
        asks = []
        for count in range(1, 9):  # one after the other: each process must know what the others sent
            asks.append(asyncio.create_task(f.call("POST", "/v1/chat/completions", CHAT)))
            await until(lambda n=count: sum(len(d.seen) for d in f.decodes) == n)
        assert [len(d.seen) for d in f.decodes] == [4, 4]
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)

        async def all_ended() -> bool:
            return "tandem_router_inflight_requests 0.0" in (await f.call("GET", "/metrics"))[1]

        await until(all_ended)
        text = (await f.call("GET", "/metrics"))[1]
        answered = 'tandem_router_requests_total{path="/v1/chat/completions",status="200"} 12.0'
        assert answered in text and 'status="499"} 8.0' in text

        faulty, well = f.decodes
        f.prefills[0].behave, well.behave, faulty.behave = answer_ok, answer_ok, always(500, {})
        for worker in f.decodes:
            worker.seen = []
        for _ in range(30):  # one process finds it faulty, and none of them sends there any more
            assert (await f.call("POST", "/v1/chat/completions", CHAT))[0] == 200
        assert (len(faulty.seen), len(well.seen)) == (1, 30)
        assert (
            f'tandem_router_worker_circuit{{role="decode",url="{faulty.url}"}} 1.0'
            in (await f.call("GET", "/metrics"))[1]
        )

        extra = DummyWorker("d9", "decode")
        await extra.start()
        try:
            assert (await f.call("POST", "/workers", {"url": extra.url, "role": "decode"}))[0] == 201
            await told(f, lambda urls: extra.url in urls)
            assert (await f.call("DELETE", f"/workers/{f.decodes[0].url}"))[0] == 200
            await told(f, lambda urls: f.decodes[0].url not in urls)
            extra.behave = obey  # one process moves it, all know
            assert (await f.call("POST", "/workers/role", {"url": extra.url, "role": "prefill"}))[0] == 200
            await told(f, lambda roles: roles.get(extra.url) == "prefill")
            (victim, *_) = f.members()
            victim.kill()
            await until(lambda: victim not in f.members() and len(f.members()) == PROCESSES)
            await told(f, lambda roles: roles.get(extra.url) == "prefill" and f.decodes[0].url not in roles)
        finally:
            await extra.stop()


async def told(f: Fleet, holds: Callable[[dict[str, str]], bool]) -> None:
    """Until twenty answers in a row, each to a connection of its own, say so."""

    async def all_say_so() -> bool:
        for _ in range(20):
            try:
                _, answer = await f.call("GET", "/workers")
            except aiohttp.ClientError:  # it was for a process that is just dead
                return False
            if not holds({w["url"]: w["role"] for w in answer["workers"]}):
                return False
        return True

    await until(all_say_so)


async def test_every_process_finds_the_pods_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(config))
    prefill = DummyWorker("p0", "prefill", host="127.0.0.31")
    decodes = [DummyWorker(f"d{i}", "decode", host=f"127.0.0.{32 + i}") for i in range(2)]
    roles = {worker.name: worker.mode for worker in (prefill, *decodes)}
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(kube_server(config))
        for worker in (prefill, *decodes):
            worker.port = prefill.port  # pods listen on one port, each at its own address
            await worker.start()
            stack.push_async_callback(worker.stop)
        discovery = ["--service-discovery", "--service-discovery-namespace", NAMESPACE]
        discovery += ["--prefill-selector", "role=prefill", "--decode-selector", "role=decode"]
        discovery += ["--service-discovery-port", str(prefill.port)]
        discovery += ["--health-check-interval-secs", "0.2"]
        process, url = await launch(stack, tmp_path, "--pd-disaggregation", *discovery)
        f = Fleet(url, process, decodes, [prefill])
        await until(lambda: kube.num_watching == 4)  # a watch for each role and process
        for worker in (prefill, decodes[0]):
            await kube.put(pod(worker.name, worker.host, labels={"role": roles[worker.name]}))
        await told(f, lambda urls: sorted(urls) == sorted((prefill.url, decodes[0].url)))
        await told_ready(f)
        await kube.put(pod(decodes[1].name, decodes[1].host, labels={"role": "decode"}))
        await told(f, lambda urls: decodes[1].url in urls)
        await kube.delete(decodes[0].name)
        await told(f, lambda urls: decodes[0].url not in urls)
        await told_ready(f)
        for _ in range(10):
            assert (await f.call("POST", "/v1/chat/completions", CHAT))[0] == 200
        assert len(decodes[1].seen) == 10 and not decodes[0].seen


async def told_ready(f: Fleet) -> None:
    """Until one answer says that every process knows every worker as healthy, and twenty bear it out."""

    async def all_ready() -> bool:
        return bool((await f.call("GET", "/readiness?workers=all"))[0] == 200)

    await until(all_ready)
    assert all([(await f.call("GET", "/readiness"))[0] == 200 for _ in range(20)])


async def test_sigterm_drains_every_process_though_all_of_them_get_it(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f:
        for worker in (*f.prefills, *f.decodes):
            worker.behave = hang
        ask = asyncio.create_task(f.call("POST", "/v1/chat/completions", CHAT))
        await until(lambda: sum(len(d.seen) for d in f.decodes) == 1)
        f.process.send_signal(DRAIN)  # as `tandem up`, which may be faster than the service manager
        for process in (psutil.Process(f.process.pid), *f.members()):
            process.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return (await f.call("GET", "/readiness"))[1]["status"] == "draining"

        await until(draining)
        for process in f.members():  # what is said twice means no more than once
            process.send_signal(DRAIN)
        assert all([await draining() for _ in range(20)])
        assert not ask.done() and f.process.poll() is None
        f.process.send_signal(signal.SIGTERM)  # the second one: at once
        assert (await ask)[0] == 503
        assert await until(lambda: f.process.poll() is not None) and f.process.returncode == 0
        await until(lambda: not any(map(lives, f.children)))


def test_the_parent_counts_the_signals_and_says_each_thing_by_one_of_its_own() -> None:
    """Two equal signals at a busy process are one to the kernel: "drain", "at once" must not be told apart by their number."""
    ends = (signal.SIGTERM, signal.SIGINT, END)
    sent = {(s, was): signal_for(s, had_sigterm=was) for s in ends for was in (False, True)}
    assert sent.pop((signal.SIGTERM, False)) is DRAIN
    assert set(sent.values()) == {END}
    for once in (signal.SIGHUP, DRAIN):  # DRAIN: of the process that started the parent
        assert all(signal_for(once, had_sigterm=was) is once for was in (False, True))


@pytest.mark.parametrize(("args", "named"), [([], "--port"), (["--workers", "0"], "--workers")])
def test_flags_that_cannot_be_honoured(args: list[str], named: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "deploy", "router", "--port", port, "--workers", "2", "--decode", "http://h:1"]
        ended = subprocess.run([*argv, *args], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode != 0 and named in ended.stderr and "Traceback" not in ended.stderr


async def test_a_block_holds_requests_in_every_process_and_all_end_with_their_parent(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f:
        for worker in (*f.prefills, *f.decodes):
            worker.behave = hang
        running = asyncio.create_task(f.call("POST", "/v1/chat/completions", CHAT))
        await until(lambda: any(worker.seen for worker in f.decodes))
        for worker in (*f.prefills, *f.decodes):
            worker.behave = answer_ok
        blocking = asyncio.create_task(f.call("POST", "/pause_generation", {"mode": "block"}))
        late = {"x-request-timeout": "0.05"}
        async with asyncio.timeout(DEADLINE_S):
            while [(await f.call("POST", "/v1/chat/completions", CHAT, **late))[0] for _ in range(12)] != [504] * 12:
                pass
        assert not blocking.done()
        running.cancel()
        assert (await blocking)[0] == 200
        for worker in (*f.prefills, *f.decodes):
            worker.seen = []
        held = [asyncio.create_task(f.call("POST", "/v1/chat/completions", CHAT)) for _ in range(6)]
        assert [(await f.call("POST", "/v1/chat/completions", CHAT, **late))[0] for _ in range(6)] == [504] * 6
        assert not any(worker.seen for worker in f.decodes) and not any(ask.done() for ask in held)
        assert (await f.call("POST", "/continue_generation", {}))[0] == 200
        assert [(await ask)[0] for ask in held] == [200] * 6
        os.kill(f.process.pid, signal.SIGKILL)
        await until(lambda: not any(map(lives, f.children)))
