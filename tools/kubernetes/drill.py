"""`make k8s-drill`: a rolling update of every worker under load, without one lost request; then an API server that is away.

The pods are the rendered `cpu-demo`'s (see `kubelet.py`), the router discovers them at an API server served here. Clients
ask without pause, half of them streaming: every answer is complete, in order, and the oracle's.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from deploy.launcher.probe import free_ports
from tests.router.pool.kube_server import kube_server
from tools.faults.household import Household
from tools.faults.traffic import Mix, Traffic
from tools.kubernetes.kubelet import Cluster, LocalPod, ended_well
from tools.kubernetes.render import KEYS

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
