"""A small kubelet and Deployment controller for one machine: pods of the rendered manifests as real processes.

Each pod gets an address of its own (127.x.y.z), its container's real command line and environment, its probes, and the end that
Kubernetes gives it: deletionTimestamp, preStop, SIGTERM, the grace period, SIGKILL. What it cannot do is said in `Cluster`.
"""

import asyncio
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.router.pool.kube_server import KubeServer, pod
from tools.faults.household import Household, Part
from tools.kubernetes.cluster_objects import EXAMPLE_IP, Pods, command_line, one

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
