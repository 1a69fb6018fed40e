"""`make churn-soak`: requests without pause while workers are killed and added and clients leave; docs/reports/reliability.md.

usage: python -m tools.faults.soak [--minutes 10] [--requests 20000] [--backends nixl mooncake] [--seed 1]

One transfer backend after the other; each runs for the minutes and until the requests are done, whichever is later (at most three times the minutes). Every answer is
checked against the oracle of the shipped model. Exit status 1 when anything of it does not hold (`report.verdict`).
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from deploy.launcher.probe import free_ports
from tests.e2e.cluster import READY_S
from tools.faults.cells import BACKENDS
from tools.faults.household import Household, Part, unclean, until
from tools.faults.load import Mix, Traffic, session
from tools.faults.memory import Watch
from tools.faults.report import BY_ROUTER, REPORTS, RESULTS, SOAKS, about_run, keep, verdict, write_page
from tools.progress import progress

ROLES = ("prefill", "decode")
MORTAL_ROUTER = "router-1"
ROUTERS = ("router", MORTAL_ROUTER)
WORKER = ("--chunked-prefill-size", "256", "--log-level", "warning", "--max-total-tokens", "16384")
GRACE_S = 15.0
ROUTER_SHARE = 0.2  # of what is done


@dataclass
class Fleet:
    """Workers that are killed and added at random, behind two routers, which get each change; `close()` must be called.

    Workers come at new addresses by the routers' POST /workers and leave their tables by DELETE /workers after their death, as an
    autoscaler or an operator would do it; some come back at the address they had, without a word to the routers. One of the routers
    is killed, too, and gets all workers when it is back. One worker of each role and one router, the veterans, are never touched:
    what leaks when others die shows there.
    """

    backend: str
    household: Household = field(default_factory=Household)
    events: Counter[str] = field(default_factory=Counter)
    _number: int = 0
    router_changes: int = 0  # deaths and returns of the mortal router so far

    def __post_init__(self) -> None:
        self._bootstrap, *ports = free_ports(1 + len(ROUTERS))
        self.routers = {name: f"http://127.0.0.1:{port}" for name, port in zip(ROUTERS, ports, strict=True)}

    async def start(self) -> None:
        """Bootstrap server, routers, and two workers of each role."""
        begin, quiet = self.household.begin, ("--log-level", "warning")
        url = f"http://127.0.0.1:{self._bootstrap}"
        begin("bootstrap", ["bootstrap", "--port", str(self._bootstrap), *quiet], url=url, health="/health")
        for name in ROUTERS:
            self._begin_router(name)
        for name in ("bootstrap", *ROUTERS):
            await self._ready(self.household.parts[name])
        for role in (*ROLES, *ROLES):
            await self.add(role)

    async def add(self, role: str) -> Part:
        """A new worker at a new address, made known to the router."""
        (port,) = free_ports(1)
        name = f"{role}-{self._number}"
        self._number += 1
        part = self._begin(name, role, port)
        await self._ready(part)
        for router in self.routers.values():
            await self._introduce(part, router)
        return part

    async def _introduce(self, part: Part, router: str) -> None:
        role = part.name.partition("-")[0]
        body = {"url": part.url, "role": role, **({"bootstrap_port": self._bootstrap} if role == "prefill" else {})}
        await asyncio.to_thread(self._tell, router, "POST", body)

    def veterans(self) -> list[str]:
        return [f"{role}-{i}" for i, role in enumerate(ROLES)]

    def mortals(self) -> list[Part]:
        kept = (*self.veterans(), "bootstrap", *ROUTERS)
        return [part for name, part in self.household.parts.items() if name not in kept and part.alive]

    async def disturb(self, rng: random.Random) -> None:
        """One worker goes, by kill -9, a killed child, or SIGTERM; one comes, at a new address or the old one. Or the
        mortal router dies and comes back."""
        if rng.random() < ROUTER_SHARE:
            return await self._kill_router()
        part = rng.choice(self.mortals())
        role = part.name.partition("-")[0]
        how = rng.choice(["kill -9", "kill -9", "child killed", "SIGTERM"])
        self.events[how] += 1
        if how == "SIGTERM":
            part.process.terminate()
        else:
            victim = part.tree()[0] if how == "kill -9" else part.child("scheduler")
            victim.kill()
        await until(lambda: not part.alive, GRACE_S + READY_S, f"{part.name} has ended")
        if rng.random() < 0.5:
            self.events["back at its address"] += 1
            port = int(part.url.rpartition(":")[2])
            await self._ready(self._begin(part.name, role, port))
        else:
            self.events["replaced at a new address"] += 1
            for router in self.routers.values():
                await asyncio.to_thread(self._tell, router, "DELETE", {"url": part.url})
            await self.add(role)
            del self.household.parts[part.name]

    async def _kill_router(self) -> None:
        """SIGKILL, at its address again at once, with the workers there are."""
        self.events["router killed"] += 1
        self.router_changes += 1
        part = self.household.parts[MORTAL_ROUTER]
        part.process.kill()
        await until(lambda: not part.alive, GRACE_S, f"{part.name} has ended")
        await self._ready(self._begin_router(MORTAL_ROUTER))
        for worker in [part for name, part in self.household.parts.items() if name.partition("-")[0] in ROLES]:
            await self._introduce(worker, self.routers[MORTAL_ROUTER])
        self.router_changes += 1

    def _begin_router(self, name: str) -> Part:
        url = self.routers[name]
        args = [
            "router",
            "--pd-disaggregation",
            "--route",
            "pair",
            "--port",
            url.rpartition(":")[2],
            "--log-level",
            "warning",
        ]
        return self.household.begin(name, args, url=url)

    def _begin(self, name: str, role: str, port: int) -> Part:
        own = ["--disaggregation-bootstrap-server", f"127.0.0.1:{self._bootstrap}"] if role == "prefill" else []
        mode = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", self.backend]
        args = ["serve", *mode, "--port", str(port), *own, *WORKER]
        return self.household.begin(name, args, url=f"http://127.0.0.1:{port}")

    def _tell(self, router: str, method: str, body: dict[str, object]) -> None:
        answer = httpx.request(method, f"{router}/workers", json=body, timeout=30.0)
        assert answer.status_code in (200, 201), answer.text

    async def _ready(self, part: Part) -> None:
        await until(part.is_ready, READY_S, f"{part.name} ready")

    def close(self) -> list[str]:
        return self.household.close()


MIX = Mix(at_once=16, most_pairs=100, most_new=24, aborts=0.1, abort_s=0.3)
SAMPLE_S = 2.0
QUIET_S = (4.0, 14.0)  # between a worker's return and the next death


class Soak:
    def __init__(self, fleet: Fleet, *, minutes: float, requests: int, seed: int) -> None:
        self._fleet, self._wanted, self._rng = fleet, requests, random.Random(seed)
        self._least_s, self._most_s = minutes * 60, minutes * 180
        self._watch = Watch()
        self._problems: list[str] = []
        self._start_s = 0.0
        self._stopped = False
        self._traffic = Traffic(MIX, self._rng, self._more, self._router, self._judged)

    async def run(self) -> dict[str, Any]:
        await self._fleet.start()
        self._start_s = time.monotonic()
        with progress(self._wanted, unit="req") as bar:
            self._traffic.on_end = lambda: bar.update(1)
            others = [asyncio.create_task(self._disturb()), asyncio.create_task(self._sample())]
            async with session() as http:
                await self._traffic.run(http)
            took_s = self._now_s()
            self._stopped = True
            await others[0]
            others[1].cancel()
            await asyncio.gather(*others, return_exceptions=True)
        workers = [part for name, part in self._fleet.household.parts.items() if name.partition("-")[0] in ROLES]
        self._problems += await unclean(workers)
        return await asyncio.to_thread(self._result, took_s)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _more(self) -> bool:
        now_s = self._now_s()
        return (now_s < self._least_s or self._traffic.begun < self._wanted) and now_s < self._most_s

    def _router(self, rng: random.Random) -> str:
        return self._fleet.routers[rng.choice(ROUTERS)]

    def _judged(self, router: str) -> Callable[[str], str]:
        """The mortal router may die meanwhile, or may not know all workers again."""
        changes, is_mortal = self._fleet.router_changes, router == self._fleet.routers[MORTAL_ROUTER]

        def judge(end: str) -> str:
            died = is_mortal and (changes % 2 or changes != self._fleet.router_changes)
            return BY_ROUTER if died and end in ("cut", "error") else end

        return judge

    async def _disturb(self) -> None:
        rng = random.Random(self._rng.random())
        while not self._stopped:
            await asyncio.sleep(rng.uniform(*QUIET_S))
            try:
                await self._fleet.disturb(rng)
            except AssertionError as error:
                self._problems.append(f"a worker did not end or come: {error}"[:600])
                return

    async def _sample(self) -> None:
        while True:
            parts = list(self._fleet.household.parts.values())
            await asyncio.to_thread(self._watch.sample, parts, self._now_s())
            await asyncio.to_thread(self._fleet.household.note_segments)
            await asyncio.sleep(SAMPLE_S)

    def _result(self, took_s: float) -> dict[str, Any]:
        self._problems += self._fleet.household.left_behind()
        traffic = self._traffic
        return {
            "backend": self._fleet.backend,
            "requests": traffic.begun,
            "took_s": took_s,
            "ends": dict(traffic.ends),
            "errors": dict(traffic.errors.most_common(12)),
            "wrong": traffic.wrong[:10],
            "slowest_s": traffic.slowest_s,
            "events": dict(self._fleet.events),
            "load": os.getloadavg()[2],
            "processes": self._watch.num_processes,
            "trends": [vars(one) for one in self._watch.trends()],
            "problems": self._problems,
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    bad = [f"{backend}: {one}" for backend in args.backends for one in _soak(backend, args)]
    print("\n".join(bad) or "all as it should be")
    return 1 if bad else 0


def _soak(backend: str, args: argparse.Namespace) -> list[str]:
    """What does not hold. The report is kept and the page written, whatever came out."""
    print(f"soak over {backend}: {args.minutes:g} minutes, {args.requests} requests", file=sys.stderr, flush=True)
    about = about_run()
    fleet = Fleet(backend)
    left = ["the cluster was not ended"]
    try:
        soak = Soak(fleet, minutes=args.minutes, requests=args.requests, seed=args.seed)
        result = asyncio.run(soak.run())
        _keep_logs(fleet)
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            left = fleet.close()
    result["problems"] += [f"left behind: {what}" for what in left]
    keep(REPORTS / SOAKS[backend], {"about": about, **result})
    write_page()
    return verdict(result)


def _keep_logs(fleet: Fleet) -> None:
    for name in (*fleet.veterans(), *ROUTERS, "bootstrap"):
        log = fleet.household.parts[name].log_tail(500_000)
        (RESULTS / f"soak.{fleet.backend}.{name}.log").write_bytes(log)


if __name__ == "__main__":
    sys.exit(main())
