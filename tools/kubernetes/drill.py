"""`make k8s-drill`: a rolling update of every worker under load, without one lost request; then an API server that is away.

The pods are the rendered `cpu-demo`'s (see `kubelet.py`), the router discovers them at an API server served here. Clients
stream and check each answer: every one complete, in order, and equal to what the same prompt gave before the upgrade.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from deploy.launcher.ports import free_ports
from tests.router.kube_server import kube_server
from tools.kubernetes.kubelet import Cluster, LocalPod, ended_well
from tools.kubernetes.render import KEYS

CLIENTS = 4
TOKENS = (48, 48, 48, 2500)  # of each client's answers; the last one's outlast preStop and need the drain
PAUSE_S = 0.05  # between two requests of a client: the machine is small, and the pods share it


@dataclass
class Load:
    """Streams without end; `answers` by prompt, `failures` in words."""

    url: str
    key: str
    session: aiohttp.ClientSession
    sent: int = 0
    answers: dict[int, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    stop: bool = False

    async def client(self, number: int) -> None:
        while not self.stop:
            await self._request(number)
            await asyncio.sleep(PAUSE_S)

    async def _request(self, number: int) -> None:
        began_s = time.monotonic()
        self.sent += 1
        try:
            text = await self._stream(number)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as err:
            self.failures.append(f"{type(err).__name__}: {err}")
            return
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        if self.answers.setdefault(number, text) != text:
            self.failures.append(f"another answer to prompt {number}: {text!r}, before {self.answers[number]!r}")

    async def _stream(self, number: int) -> str:
        words = " ".join(f"k{i:02d} v{(7 * i + number) % 90 + 10}" for i in range(20))
        body = {
            "text": f"{words} k{number:02d}",
            "stream": True,
            "sampling_params": {"max_new_tokens": TOKENS[number], "temperature": 0, "ignore_eos": True},
        }
        events: list[Any] = []
        async with self.session.post(
            self.url + "/generate", json=body, headers={"Authorization": f"Bearer {self.key}"}
        ) as response:
            if response.status != 200:
                raise ValueError(f"{response.status} {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    events.append(json.loads(line[6:]))
        if "error" in events[-1] or events[-1]["meta_info"]["completion_tokens"] != TOKENS[number]:
            raise ValueError(f"the stream ended with {events[-1]}")
        return str(events[-1]["text"])


async def drill() -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kubeconfig = folder / "kubeconfig"
        keys = make_keys(folder / "keys")
        kube = await stack.enter_async_context(kube_server(kubeconfig))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)))
        cluster = Cluster("cpu-demo", folder, keys, kube, kubeconfig, *free_ports(1), session)
        stack.callback(cluster.end)
        workers = [await cluster.start(component) for component in ("prefill", "decode")]
        router = await cluster.start("router")
        load = Load(f"http://{router.ip}:{cluster.router_port}", (keys / "api.keys").read_text(), session)
        clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
        for client in clients:
            stack.callback(client.cancel)
        await until(lambda: len(load.answers) == CLIENTS and load.sent > 2 * CLIENTS, load)
        phases: dict[str, Any] = {"before": take(load)}
        await upgrade(cluster, workers, load, phases)
        await without_api_server(cluster, load, phases)
        load.stop = True
        await asyncio.gather(*clients)
        await cluster.delete(router)
        phases["pods that ended by themselves, status 0"] = ended_well([*workers, router])
        return {
            "phases": phases,
            "requests": load.sent,
            "failures": load.failures[:20],
            "longest_s": round(load.longest_s, 2),
        }


async def upgrade(cluster: Cluster, workers: list[LocalPod], load: Load, phases: dict[str, Any]) -> None:
    """Every worker is replaced, one after the other."""
    for old in workers:
        await cluster.replace(old)
        await more(load)
        phases[f"{old.template.component} replaced"] = take(load)


async def without_api_server(cluster: Cluster, load: Load, phases: dict[str, Any]) -> None:
    """It refuses and every watch is cut: serving goes on. A worker that comes meanwhile joins when it is back."""
    cluster.kube.refuse = 503
    cluster.kube.cut()
    extra = await cluster.start("decode")
    await more(load)
    assert extra.ip not in await known(cluster, load)
    cluster.kube.refuse = None
    while extra.ip not in await known(cluster, load):
        await asyncio.sleep(0.1)
    await more(load)
    phases["API server away and back"] = take(load)


async def known(cluster: Cluster, load: Load) -> str:
    """The router's workers, as text."""
    async with cluster.session.get(load.url + "/workers", headers={"Authorization": f"Bearer {load.key}"}) as answer:
        return await answer.text()


async def more(load: Load) -> None:
    """Further requests, enough that every client sends some."""
    target = load.sent + 3 * CLIENTS
    await until(lambda: load.sent >= target, load)


async def until(condition: Any, load: Load, most_s: float = 120.0) -> None:
    async with asyncio.timeout(most_s):
        while not condition():
            if load.failures:
                raise AssertionError(load.failures)
            await asyncio.sleep(0.05)


def take(load: Load) -> dict[str, int]:
    return {"requests so far": load.sent, "failed": len(load.failures)}


def make_keys(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    for name in KEYS:
        (folder / name).write_text(os.urandom(32).hex())
        (folder / name).chmod(0o600)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level="WARNING")
    began_s = time.monotonic()
    report = asyncio.run(drill())
    report |= {
        "seconds": round(time.monotonic() - began_s, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.report is not None and not report["failures"]:
        args.report.write_text(text + "\n")
    return 1 if report["failures"] or not report["phases"]["pods that ended by themselves, status 0"] else 0


if __name__ == "__main__":
    sys.exit(main())
