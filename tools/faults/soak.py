"""`make churn-soak`: requests without pause while workers are killed and added and clients leave; docs/reports/reliability.md.

usage: python -m tools.faults.soak [--minutes 10] [--requests 20000] [--backends nixl mooncake] [--seed 1]

One transfer backend after the other; each runs for the minutes and until the requests are done, whichever is later (at most three times the minutes). Every answer is
checked against the oracle of the shipped model. Exit status 1 when anything of it does not hold (`soak_report.verdict`).
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from tools.faults.cells import BACKENDS
from tools.faults.churn import MORTAL_ROUTER, ROLES, ROUTERS, Fleet
from tools.faults.household import unclean
from tools.faults.memory import Watch
from tools.faults.report import REPORTS, RESULTS, SOAKS, about_run, keep, write_page
from tools.faults.soak_report import BY_ROUTER, verdict
from tools.faults.traffic import Mix, Traffic, session
from tools.progress import progress

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
