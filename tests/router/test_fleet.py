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
import uvloop

from tests.router.dummies import DummyWorker, hang, obey

DEADLINE_S = 60.0
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@dataclass
class Fleet:
    """A router of several processes, each of which has answered."""

    url: str
    process: "subprocess.Popen[bytes]"
    decodes: list[DummyWorker]
    prefills: list[DummyWorker]
    children: list[psutil.Process] = field(default_factory=list)

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Over a connection of its own: any of the processes may get it."""
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            session.request(method, self.url + path, json=body) as response,
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


async def until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, or of what it awaits."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            value = condition()
            value = await value if asyncio.iscoroutine(value) else value
            if value:
                return value
            await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet(tmp_path: Path, *args: str, workers: int = 3, decode: int = 2) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        prefills = [DummyWorker("p0", "prefill", info={"disaggregation_bootstrap_port": 8998})]
        decodes = [DummyWorker(f"d{i}", "decode") for i in range(decode)]
        for worker in (*prefills, *decodes):
            await worker.start()
            stack.push_async_callback(worker.stop)
        ready = tmp_path / "ready.json"
        ready.unlink(missing_ok=True)
        argv = [
            *(sys.executable, "-m", "deploy", "router", "--port", "0", "--workers", str(workers)),
            *("--ready-file", str(ready), "--prefill", prefills[0].url, *args),
            *(word for worker in decodes for word in ("--decode", worker.url)),
        ]
        process = subprocess.Popen(argv)
        stack.callback(end, process)
        await until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None
        running = Fleet(json.loads(ready.read_text())["router"], process, decodes, prefills)
        await until(lambda: len(running.members()) == workers)
        running.children = psutil.Process(process.pid).children()
        yield running


def end(process: "subprocess.Popen[bytes]") -> None:
    """The whole tree, whatever became of it."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    process.kill()
    process.wait()
    for child in tree:
        if child.is_running():
            child.kill()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_processes_share_the_load_the_pool_and_the_metrics(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, "--health-check-interval-s=600") as f:  # what they know they are told
            for _ in range(12):
                assert (await f.call("POST", "/v1/chat/completions", BODY))[0] == 200
            traced = (await f.call("POST", "/traces", {"last": 12}))[1]["records"]  # whichever process served them
            assert len({record["request_id"] for record in traced}) == 12 == len(traced)
            for worker in (*f.prefills, *f.decodes):
                worker.behave, worker.seen = hang, []
            asks = []
            for count in range(1, 9):  # one after the other: each process must know what the others sent
                asks.append(asyncio.create_task(f.call("POST", "/v1/chat/completions", BODY)))
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

            extra = DummyWorker("d9", "decode")
            await extra.start()
            try:
                assert (await f.call("POST", "/workers", {"url": extra.url, "role": "decode"}))[0] == 201
                await told(f, lambda urls: extra.url in urls)
                assert (await f.call("DELETE", "/workers", {"url": f.decodes[0].url}))[0] == 200
                await told(f, lambda urls: f.decodes[0].url not in urls)
                extra.behave = obey  # one process moves it, all know
                assert (await f.call("POST", "/workers/role", {"url": extra.url, "role": "prefill"}))[0] == 200
                await told(f, lambda roles: roles.get(extra.url) == "prefill")
                (victim, *_) = f.members()
                victim.kill()
                await until(lambda: victim not in f.members() and len(f.members()) == 3)
                await told(f, lambda roles: roles.get(extra.url) == "prefill" and f.decodes[0].url not in roles)
            finally:
                await extra.stop()

    uvloop.run(scenario())


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


def test_sigterm_drains_every_process_though_all_of_them_get_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, workers=2) as f:
            for worker in (*f.prefills, *f.decodes):
                worker.behave = hang
            ask = asyncio.create_task(f.call("POST", "/v1/chat/completions", BODY))
            await until(lambda: sum(len(d.seen) for d in f.decodes) == 1)
            for process in (psutil.Process(f.process.pid), *f.members()):
                process.send_signal(signal.SIGTERM)

            async def draining() -> bool:
                return (await f.call("GET", "/readiness"))[1]["status"] == "draining"

            await until(draining)
            assert not ask.done() and f.process.poll() is None
            f.process.send_signal(signal.SIGTERM)  # the second one: at once
            assert (await ask)[0] == 503
            assert await until(lambda: f.process.poll() is not None) and f.process.returncode == 0
            await until(lambda: gone(f.children))

    uvloop.run(scenario())


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, workers=2, decode=1) as f:
            os.kill(f.process.pid, signal.SIGKILL)
            await until(lambda: gone(f.children))

    uvloop.run(scenario())


@pytest.mark.parametrize(("args", "named"), [([], "--port"), (["--workers", "0"], "--workers")])
def test_flags_that_cannot_be_honoured(args: list[str], named: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "deploy", "router", "--port", port, "--workers", "2", "--decode", "http://h:1"]
        ended = subprocess.run([*argv, *args], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode != 0 and named in ended.stderr and "Traceback" not in ended.stderr
