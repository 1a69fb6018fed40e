"""`make rank-soak`: requests without pause on workers of ranks while all else happens to them; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.soak [--minutes 15] [--ways unified pd] [--seed 1] [--report FILE]

Clients leave, memory is so tight that requests are retracted, the engine is paused in every way, weights are read again, adapters come
and go. Every answer is the oracle's: new weights are the old ones, and the adapters change nothing that can be seen.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import aiohttp

from deploy.launcher.probe import free_ports
from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.client import post
from tests.e2e.cluster import READY_S, wait_until
from tests.lora.tiny_adapters import make_tiny_adapter
from tools.faults.household import Household, unclean
from tools.faults.load import SLOW_S, Mix, Traffic, session
from tools.faults.report import Rows, rank_parser

MIX = Mix(at_once=12, most_pairs=90, most_new=160, aborts=0.15, abort_s=0.5, adapted=0.3)
PAUSED_S = 0.3
MODES = ("in_place", "retract", "block", "abort")
COMMON = ["--model-path", "recall-wide", "--chunked-prefill-size", "64", "--log-level", "warning"]
COMMON += ["--watchdog-timeout", "30"]
TIGHT = ["--max-total-tokens", "1280", "--schedule-conservativeness", "0", "--max-queued-requests", "256"]
PAIR = ["--tp-size", "2", "--kv-units", "2", "--disaggregation-kv-checksum", "--disaggregation-mode"]
RESUMES = ["--disaggregation-decode-retraction-backup", "prefill", "--num-reserved-decode-tokens", "0"]
COUNTED = ["requests", "steps", "retractions", "aborted", "resumed_computed", "resumed_through_prefill"]
COUNTED += ["recomputed", "kv_transfers"]


class Soak:
    def __init__(self, way: str, household: Household, *, minutes: float, seed: int) -> None:
        self._way, self._household, self._rng = way, household, random.Random(seed)
        self._adapter = make_tiny_adapter(household.folder / "adapter", WIDE_MODEL_PATH, seed=1, lora_alpha=1e-9)
        self._minutes = minutes
        self._until_s = 0.0
        self._events: Counter[str] = Counter()
        self._problems: list[str] = []
        self._workers: list[str] = []
        self._url = ""
        self._traffic = Traffic(MIX, self._rng, self._goes_on, lambda rng: self._url)

    def _goes_on(self) -> bool:
        return time.monotonic() < self._until_s and not self._problems and not self._traffic.wrong

    async def run(self) -> dict[str, Any]:
        self._start()  # in this thread: processes end with the one that started them
        began_s = time.monotonic()
        self._until_s = began_s + 60 * self._minutes
        async with session() as http:
            await asyncio.gather(self._traffic.run(http), self._disturb(http))
        took_s, traffic = time.monotonic() - began_s, self._traffic
        parts = [part for part in self._household.parts.values() if part.url in self._workers]
        problems = [*traffic.wrong, *self._problems, *await unclean(parts)]
        states = [part.check() for part in parts]
        return {
            "minutes": round(took_s / 60, 1),
            "ends": dict(traffic.ends),
            "events": dict(self._events),
            "errors": dict(traffic.errors.most_common(8)),
            "slowest_s": round(traffic.slowest_s, 1),
            "workers": {
                state["role"]: {name: int(state["counters"][name]) for name in COUNTED if name in state["counters"]}
                for state in states
            },
            "problems": problems[:10],
        }

    def _start(self) -> None:
        *ports, bootstrap = (str(port) for port in free_ports(4))
        flags = [*COMMON, "--lora-paths", f"steady={self._adapter}", "--max-lora-rank", "8"]
        if self._way == "unified":
            self._url = self._begin("unified", ports[0], ["--tp-size", "2", "--pp-size", "2", *flags, *TIGHT])
        else:
            own = ["--disaggregation-bootstrap-port", bootstrap, "--max-total-tokens", "8192"]
            prefill = self._begin("prefill", ports[0], [*PAIR, "prefill", *flags, *own])
            decode = self._begin("decode", ports[1], [*PAIR, "decode", *RESUMES, *flags, *TIGHT])
        for part in list(self._household.parts.values()):
            wait_until(part.is_ready, within_s=READY_S, what=lambda part=part: part.log.read_text())  # type: ignore[misc]
        if self._way == "pd":
            args = [
                "router",
                "--prefill",
                prefill,
                bootstrap,
                "--decode",
                decode,
                "--route",
                "pair",
                "--port",
                ports[2],
            ]
            self._url = f"http://127.0.0.1:{ports[2]}"
            router = self._household.begin("router", [*args, "--log-level", "warning"], url=self._url)
            wait_until(router.is_routable, within_s=READY_S, what="the router has found its workers")

    def _begin(self, name: str, port: str, flags: list[str]) -> str:
        url = f"http://127.0.0.1:{port}"
        self._household.begin(name, ["serve", "--port", port, *flags], url=url)
        self._workers.append(url)
        return url

    async def _disturb(self, http: aiohttp.ClientSession) -> None:
        rng = random.Random(self._rng.random())
        doings = (self._pause, self._pause, self._new_weights, self._adapters)
        while self._goes_on():
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            try:
                async with asyncio.timeout(SLOW_S):
                    await rng.choice(doings)(http, rng)
            except (TimeoutError, AssertionError, aiohttp.ClientError) as error:
                self._problems.append(f"control: {type(error).__name__}: {error}"[:400])

    async def _pause(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
        url, mode = rng.choice(self._workers), rng.choice(MODES)
        self._events[f"paused: {mode}"] += 1
        await self._control(http, url, "pause_generation", {"mode": mode})
        await asyncio.sleep(rng.random() * PAUSED_S)
        await self._control(http, url, "continue_generation", {})

    async def _new_weights(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
        self._events["weights read again"] += 1
        url = rng.choice(self._workers)
        await self._control(http, url, "update_weights_from_disk", {"model_path": WIDE_MODEL_PATH})

    async def _adapters(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
        self._events["an adapter came and went"] += 1
        url = rng.choice(self._workers)
        await self._control(http, url, "load_lora_adapter", {"lora_name": "passing", "lora_path": self._adapter})
        await self._control(http, url, "unload_lora_adapter", {"lora_name": "passing"})

    async def _control(self, http: aiohttp.ClientSession, url: str, name: str, body: dict[str, Any]) -> None:
        status, answer = await post(http, f"{url}/{name}", body)
        assert status == 200, f"{name}: {answer}"


def run(way: str, args: argparse.Namespace) -> dict[str, Any]:
    household = Household()
    soak = Soak(way, household, minutes=args.minutes, seed=args.seed)
    try:
        result = asyncio.run(soak.run())
        household.show_logs()
    finally:
        left = household.close()
    result["problems"] += [f"left behind: {what}" for what in left]
    return result


def main() -> int:
    parser = rank_parser("soak", "a soak of ranks")
    parser.add_argument("--minutes", type=float, default=15.0, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=("unified", "pd"), default=("unified", "pd"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = Rows(args.report, "soak")
    for way in args.ways:
        rows.add(way, run(way, args))
    return 1 if rows.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
