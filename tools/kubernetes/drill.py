"""`make k8s-drill`: a rolling update of every worker under load, without one lost request; then an API server that is away.

The pods are the rendered `cpu-demo`'s, as real processes: each has an address of its own (127.x.y.z), its container's command line,
environment and probes, and the end that Kubernetes gives it (preStop, SIGTERM, the grace period, SIGKILL). The router discovers them at
an API server served here. Clients ask without pause, half of them streaming: every answer is complete, in order, and the oracle's.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from deploy.launcher.probe import free_ports
from tests.router.pool.kube_server import KubeServer, kube_server, pod
from tools.faults.household import Household, Part
from tools.faults.load import Mix, Traffic
from tools.kubernetes.cluster_objects import EXAMPLE_IP, Pods, command_line, one
from tools.kubernetes.render import KEYS

ROUTER_PORT = "--port=8080"


@dataclass
class LocalPod:
    """`killed`: it did not end within its grace period."""

    name: str
    ip: str
    template: Pods
    part: Part
    ready: bool = False
    killed: bool = False


@dataclass
class Cluster:
    """Pods of one overlay. Images, volumes, network policies and scheduling are not played; preStop pauses are, in full."""

    overlay: str
    household: Household
    keys: Path
    kube: KubeServer
    kubeconfig: Path
    router_port: int
    session: aiohttp.ClientSession
    pods: list[LocalPod] = field(default_factory=list)
    _count: int = 0

    async def start(self, component: str) -> LocalPod:
        """Create a pod and wait until it is Ready."""
        self._count += 1
        template = one(self.overlay, component)
        ip, name = f"127.0.1.{self._count}", f"{component}-{self._count}"
        tandem, *words = [self._local(word, ip) for word in command_line(self.overlay, template)]
        assert tandem == "tandem"
        env = {"KUBECONFIG": str(self.kubeconfig)}
        part = self.household.begin(name, words, url=f"http://{ip}", env=env, health="/liveness")
        found = LocalPod(name, ip, template, part)
        self.pods.append(found)
        await self._tell(found)
        await self._probe_until_ready(found)
        return found

    async def delete(self, found: LocalPod) -> None:
        """As `kubectl delete pod`: returns when it is gone."""
        await self._tell(found, deletionTimestamp="2026-01-01T00:00:00Z")
        pause_s = float(found.template.container["lifecycle"]["preStop"]["exec"]["command"][1])
        await asyncio.sleep(pause_s)
        found.part.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._gone(found), found.template.spec["terminationGracePeriodSeconds"] - pause_s)
        except TimeoutError:
            found.killed = True
            found.part.process.kill()
            await self._gone(found)
        self.pods.remove(found)
        if found.template.component != "router":
            await self.kube.delete(found.name)

    async def replace(self, old: LocalPod) -> LocalPod:
        """One step of a rolling update with maxSurge 1 and maxUnavailable 0."""
        rolling = old.template.owner["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": 1, "maxUnavailable": 0}
        new = await self.start(old.template.component)
        await self.delete(old)
        return new

    def _local(self, word: str, ip: str) -> str:
        """The few words that only hold in a pod: its addresses, its mounts, the port of a router that many tests share."""
        word = word.replace(EXAMPLE_IP, ip).replace("/etc/tandem/keys", str(self.keys))
        return {"--host=0.0.0.0": f"--host={ip}", ROUTER_PORT: f"--port={self.router_port}"}.get(word, word)

    async def _tell(self, found: LocalPod, **more: Any) -> None:
        """The pod as the API server shows it. (No router discovers routers.)"""
        if found.template.component != "router":
            annotations = dict(found.template.annotations)
            await self.kube.put(
                pod(
                    found.name,
                    found.ip,
                    labels=found.template.labels,
                    ready=found.ready,
                    annotations=annotations,
                    **more,
                )
            )

    async def _probe_until_ready(self, found: LocalPod) -> None:
        startup = found.template.container["startupProbe"]
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + startup["periodSeconds"] * startup["failureThreshold"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            while not await self._probe(found, probe):
                if not found.part.alive or loop.time() > deadline_s:
                    raise AssertionError(
                        f"{found.name} does not pass its {probe}: {found.part.log.read_text()[-2000:]}"
                    )
                await asyncio.sleep(0.2)
        found.ready = True
        await self._tell(found)

    async def _probe(self, found: LocalPod, name: str) -> bool:
        asked = found.template.container[name]["httpGet"]
        port = self.router_port if found.template.component == "router" else found.template.ports()[asked["port"]]
        try:
            async with self.session.get(f"http://{found.ip}:{port}{asked['path']}") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _gone(self, found: LocalPod) -> None:
        while found.part.alive:
            await asyncio.sleep(0.05)


def ended_well(pods: Iterable[LocalPod]) -> bool:
    return all(found.part.process.poll() == 0 and not found.killed for found in pods)


MORE_S = 120.0
# The longest answers outlast preStop and need the drain. No client leaves.
MIX = Mix(at_once=4, most_pairs=20, most_new=2500, aborts=0.0, abort_s=0.0)


async def drill() -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        household = Household()
        stack.callback(household.close)
        kubeconfig = household.folder / "kubeconfig"
        keys = make_keys(household.folder / "keys")
        kube = await stack.enter_async_context(kube_server(kubeconfig))
        bearer = {"Authorization": f"Bearer {(keys / 'api.keys').read_text()}"}
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=bearer))
        cluster = Cluster("cpu-demo", household, keys, kube, kubeconfig, *free_ports(1), session)
        workers = [await cluster.start(component) for component in ("prefill", "decode")]
        router = await cluster.start("router")
        over, url = asyncio.Event(), f"http://{router.ip}:{cluster.router_port}"
        load = Traffic(MIX, random.Random(1), lambda: not over.is_set(), lambda rng: url)
        clients = asyncio.create_task(load.run(session))
        stack.callback(clients.cancel)
        await more(load)
        phases: dict[str, Any] = {"before": take(load)}
        await upgrade(cluster, workers, load, phases)
        await without_api_server(cluster, load, phases)
        over.set()
        await clients
        await cluster.delete(router)
        phases["pods that ended by themselves, status 0"] = ended_well([*workers, router])
        return {
            "phases": phases,
            "requests": load.begun,
            "failures": failures(load)[:20],
            "longest_s": round(load.slowest_s, 2),
        }


async def upgrade(cluster: Cluster, workers: list[LocalPod], load: Traffic, phases: dict[str, Any]) -> None:
    """Every worker is replaced, one after the other."""
    for old in workers:
        await cluster.replace(old)
        await more(load)
        phases[f"{old.template.component} replaced"] = take(load)


async def without_api_server(cluster: Cluster, load: Traffic, phases: dict[str, Any]) -> None:
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


async def known(cluster: Cluster, load: Traffic) -> str:
    """The router's workers, as text."""
    async with cluster.session.get(load.url(load.rng) + "/workers") as answer:
        return await answer.text()


async def more(load: Traffic) -> None:
    """Further requests, enough that every client sends some."""
    target = load.begun + 3 * MIX.at_once
    async with asyncio.timeout(MORE_S):
        while load.begun < target:
            if failures(load):
                raise AssertionError(failures(load))
            await asyncio.sleep(0.05)


def failures(load: Traffic) -> list[str]:
    return [*load.wrong, *load.errors]


def take(load: Traffic) -> dict[str, int]:
    return {"requests so far": load.begun, "failed": len(failures(load))}


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
