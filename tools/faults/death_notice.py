"""`make death-notice`: how soon the router notices a worker that is frozen or cut off, and that it is back; docs/reports/reliability.md.

usage: python -m tools.faults.death_notice [--times 10] [--quiet-s 60]

Real processes with default flags. Exit status 1 when anything took `LIMIT_S` or longer to be noticed.
"""

import argparse
import asyncio
import random
import sys
import time
from typing import Any

import aiohttp
import httpx2 as httpx

from tests.e2e.cluster import wait_until
from tools.faults.cells import Victim
from tools.faults.load import Load
from tools.faults.report import NOTICE, REPORTS, about_run, keep, write_page
from tools.faults.rig_on_links import RigOnLinks

LIMIT_S = 3.0
WITHIN_S = 30.0
STREAMS = 4
NEW_TOKENS = 200
ROWS = [(fault, victim) for fault in ("stop", "cut") for victim in (Victim.PREFILL, Victim.DECODE)]


class Watch:
    """What the router says of one worker."""

    def __init__(self, rig: RigOnLinks, victim: Victim) -> None:
        self._client = httpx.Client(base_url=rig.router, timeout=5.0)
        self._role = str(victim)

    def is_well(self) -> bool:
        (worker,) = [w for w in self._client.get("/workers").json()["workers"] if w["role"] == self._role]
        return bool(worker["is_healthy"])

    def until(self, well: bool) -> float:
        """Seconds until the router says so."""
        began_s = time.monotonic()
        wait_until(lambda: self.is_well() is well, within_s=WITHIN_S, what=f"the {self._role} worker is well: {well}")
        return time.monotonic() - began_s


def measure(rig: RigOnLinks, fault: str, victim: Victim, *, times: int, draw: random.Random) -> dict[str, Any]:
    begin, end = (rig.stop, rig.resume) if fault == "stop" else (rig.cut, rig.heal)
    watch, noticed, back = Watch(rig, victim), list[float](), list[float]()
    for _ in range(times):
        watch.until(True)
        time.sleep(draw.uniform(1.0, 2.5))  # any moment between two checks
        begin(victim)
        try:
            noticed.append(round(watch.until(False), 3))
        finally:
            end(victim)
        back.append(round(watch.until(True), 3))
    print(f"{fault} {victim}: noticed {noticed}, back {back}", flush=True)
    return {"fault": fault, "victim": str(victim), "noticed_s": noticed, "back_s": back}


async def alarms(rig: RigOnLinks, *, seconds: float) -> dict[str, Any]:
    """Under load, with nothing wrong: how often a worker is called silent."""
    began_s, silent, answers, seed = time.monotonic(), 0, 0, 0
    well = {"prefill": True, "decode": True}
    async with aiohttp.ClientSession(rig.router) as session:
        while time.monotonic() - began_s < seconds:
            seed += 1
            load = Load(rig.router, count=STREAMS, new_tokens=NEW_TOKENS, seed=seed)
            while not load.is_over:
                async with session.get("/workers") as response:
                    now = {w["role"]: w["is_healthy"] for w in (await response.json())["workers"]}
                silent += sum(well[role] and not now[role] for role in well)
                well = now
                await asyncio.sleep(0.1)
            answers += sum(outcome.end == "right" for outcome in await load.outcomes(0.0))
    return {"silent": silent, "seconds": time.monotonic() - began_s, "streams": STREAMS, "answers": answers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--quiet-s", type=float, default=60.0, help="how long to look for false alarms")
    args = parser.parse_args()
    about, draw = about_run(), random.Random(1)
    rig = RigOnLinks("nixl")
    try:
        rig.start_all()
        found = asyncio.run(alarms(rig, seconds=args.quiet_s))
        rows = [measure(rig, fault, victim, times=args.times, draw=draw) for fault, victim in ROWS]
    finally:
        left = rig.close()
    keep(REPORTS / NOTICE, {"about": about, "rows": rows, "alarms": found})
    write_page()
    late = [row for row in rows if max(row["noticed_s"]) >= LIMIT_S]
    return 1 if left or late else 0


if __name__ == "__main__":
    sys.exit(main())
