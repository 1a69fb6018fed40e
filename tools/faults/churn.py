"""A fleet whose workers are killed and added at random, at run time, behind two routers that are told of it.

Workers come at new addresses by the routers' POST /workers and leave their tables by DELETE /workers after their death, as
an autoscaler or an operator would do it; some come back at the address they had, without a word to the routers. One
of the routers is killed, too, and told of all workers when it is back. One worker of each role and one router, the
veterans, are never touched: what leaks when others die shows there.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx2 as httpx

from deploy.launcher.probe import free_ports
from tests.e2e.cluster import READY_S
from tools.faults.household import Household, Part, until

ROLES = ("prefill", "decode")
MORTAL_ROUTER = "router-1"
ROUTERS = ("router", MORTAL_ROUTER)
WORKER = ("--chunked-prefill-size", "256", "--log-level", "warning", "--max-total-tokens", "16384")
GRACE_S = 15.0
ROUTER_SHARE = 0.2  # of what is done


@dataclass
class Fleet:
    """`close()` must be called."""

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
        """SIGKILL, at its address again at once, and told of the workers there are."""
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
        args = ["router", "--pd-disaggregation", "--port", url.rpartition(":")[2], "--log-level", "warning"]
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
