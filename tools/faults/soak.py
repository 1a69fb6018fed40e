"""`make churn-soak`: requests without pause while workers are killed and added and clients leave; docs/reports/reliability.md.

usage: python -m tools.faults.soak [--minutes 10] [--requests 20000] [--backends nixl mooncake] [--seed 1]

One transfer backend after the other; each runs for the minutes and until the requests are done, whichever is later (at most three times the minutes). Every answer is
checked against the oracle of the shipped model. Exit status 1 when anything of it does not hold (`soak_report.verdict`).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import httpx2 as httpx

from tests.e2e.client import left_over
from tests.e2e.workload import recall_body
from tools.faults.cells import BACKENDS
from tools.faults.churn import MORTAL_ROUTER, ROLES, ROUTERS, Fleet
from tools.faults.load import judge
from tools.faults.memory import Watch
from tools.faults.progress import progress
from tools.faults.report import PAGE, REPORTS, RESULTS, SOAKS, about_run, keep, write_page
from tools.faults.soak_report import BY_ROUTER, verdict

AT_ONCE = 16
ABORTS = 0.1  # share of clients that leave
SAMPLE_S = 2.0
QUIET_S = (4.0, 14.0)  # between a worker's return and the next death
SLOW_S = 120.0
SETTLE_S = 60.0
LAST_PAIRS, LAST_NEW = 100, 24


class Soak:
    def __init__(self, fleet: Fleet, *, minutes: float, requests: int, seed: int) -> None:
        self._fleet, self._wanted, self._rng = fleet, requests, random.Random(seed)
        self._least_s, self._most_s = minutes * 60, minutes * 180
        self._ends: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._slowest_s = 0.0
        self._begun = 0
        self._watch = Watch()
        self._problems: list[str] = []
        self._start_s = 0.0

    async def run(self) -> dict[str, Any]:
        await self._fleet.start()
        self._start_s = time.monotonic()
        with progress(self._wanted, unit="req") as self._bar:
            others = [asyncio.create_task(self._disturb()), asyncio.create_task(self._sample())]
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                await asyncio.gather(*(self._client(http) for _ in range(AT_ONCE)))
            took_s = self._now_s()
            self._stopped = True
            await others[0]
            others[1].cancel()
            await asyncio.gather(*others, return_exceptions=True)
        return await asyncio.to_thread(self._result, took_s)

    _stopped = False

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _more(self) -> bool:
        now_s = self._now_s()
        return (now_s < self._least_s or self._begun < self._wanted) and now_s < self._most_s

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while self._more():
            self._begun += 1
            rng = random.Random(self._rng.random())
            began_s = time.monotonic()
            end, detail = await self._one(http, rng)
            self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)
            self._ends[end] += 1
            if end in ("error", BY_ROUTER):
                self._errors[_class_of(detail)] += 1
                await asyncio.sleep(0.05)  # a client that backs off
            elif end not in ("right", "left"):
                self._wrong.append(f"{end}: {detail}"[:400])
            self._bar.update(1)

    async def _one(self, http: aiohttp.ClientSession, rng: random.Random) -> tuple[str, str]:
        body, _ = recall_body(rng, rng.randint(5, LAST_PAIRS))
        new = rng.randint(1, LAST_NEW)
        body["sampling_params"] |= {"max_new_tokens": new, "ignore_eos": True}
        body["stream"] = rng.random() < 0.5
        task = asyncio.create_task(self._ask(http, rng.choice(ROUTERS), body, new))
        if rng.random() < ABORTS:
            await asyncio.wait({task}, timeout=rng.random() * 0.3)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return "left", ""
        return await task

    async def _ask(self, http: aiohttp.ClientSession, router: str, body: dict[str, Any], new: int) -> tuple[str, str]:
        changes = self._fleet.router_changes
        try:
            async with asyncio.timeout(SLOW_S):
                async with http.post(f"{self._fleet.routers[router]}/generate", json=body) as response:
                    whole = await response.read()
            end, detail = judge(response.status, whole, body["input_ids"], new)
        except TimeoutError:
            return "hangs", f"no end within {SLOW_S:g} s"
        except (aiohttp.ClientError, ConnectionError) as error:
            end, detail = "cut", f"{type(error).__name__}: {error}"
        died = router == MORTAL_ROUTER and (changes % 2 or changes != self._fleet.router_changes)
        return (BY_ROUTER, detail) if died and end in ("cut", "error") else (end, detail)

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

    # ---- afterwards

    def _result(self, took_s: float) -> dict[str, Any]:
        workers = [part for name, part in self._fleet.household.parts.items() if name.partition("-")[0] in ROLES]
        for part in workers:
            if (left := _left_in(part.url)) is not None:
                self._problems.append(f"{part.name} is not clean: {left}")
        self._problems += self._fleet.household.left_behind()
        return {
            "backend": self._fleet.backend,
            "requests": self._begun,
            "took_s": took_s,
            "ends": dict(self._ends),
            "errors": dict(self._errors.most_common(12)),
            "wrong": self._wrong[:10],
            "slowest_s": self._slowest_s,
            "events": dict(self._fleet.events),
            "load": os.getloadavg()[2],
            "processes": self._watch.num_processes,
            "trends": [vars(one) for one in self._watch.trends()],
            "problems": self._problems,
        }


def _class_of(detail: str) -> str:
    """A message without its addresses and numbers."""
    return re.sub(r"\d+", "N", re.sub(r"http://\S+", "URL", detail))[:160]


def _left_in(url: str) -> str | None:
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        state = json.loads(httpx.get(f"{url}/check", timeout=10.0).text)
        if (left := left_over(state)) is None or time.monotonic() > deadline_s:
            return left
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where logs go")
    parser.add_argument("--reports", type=Path, default=REPORTS, help="where the report goes; the page beside it")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
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
        _keep_logs(fleet, args.results)
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            left = fleet.close()
    result["problems"] += [f"left behind: {what}" for what in left]
    keep(SOAKS[backend], {"about": about, **result}, args.reports)
    write_page(args.reports, args.reports / PAGE.name)
    return verdict(result)


def _keep_logs(fleet: Fleet, results: Path) -> None:
    for name in (*fleet.veterans(), *ROUTERS, "bootstrap"):
        (results / f"soak.{fleet.backend}.{name}.log").write_bytes(
            fleet.household.parts[name].log.read_bytes()[-500_000:]
        )


if __name__ == "__main__":
    sys.exit(main())
