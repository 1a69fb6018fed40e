"""`make rank-soak`: requests without pause on workers of ranks while all else happens to them; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.soak [--minutes 15] [--ways unified pd] [--seed 1] [--report FILE]

Clients leave, memory is so tight that requests are retracted, the engine is paused in every way, weights are read again, adapters come
and go. Every answer is the oracle's: new weights are the old ones, and the adapters change nothing that can be seen.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import httpx2 as httpx

from deploy.launcher.ports import free_ports
from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.client import left_over, post
from tests.e2e.cluster import READY_S, wait_until
from tests.e2e.workload import recall_body
from tests.lora.tiny_adapters import make_tiny_adapter
from tools.faults.household import Household
from tools.faults.load import judge
from tools.faults.ranks.report import REPORT, begun, keep

AT_ONCE = 12
ABORTS, ADAPTED = 0.15, 0.3  # shares of the requests
LAST_PAIRS, LAST_NEW = 90, 160
POOL_TOKENS = 1280
SLOW_S = 120.0
PAUSED_S = 0.3
SETTLE_S = 60.0
MODES = ("in_place", "retract", "block", "abort")
COMMON = (
    "--model-path",
    "recall-wide",
    "--chunked-prefill-size",
    "64",
    "--log-level",
    "warning",
    "--watchdog-timeout",
    "30",
)
TIGHT = ("--max-total-tokens", str(POOL_TOKENS), "--schedule-conservativeness", "0", "--max-queued-requests", "256")
COUNTED = (
    "requests",
    "steps",
    "retractions",
    "aborted",
    "resumed_computed",
    "resumed_through_prefill",
    "recomputed",
    "kv_transfers",
)


class Soak:
    def __init__(self, way: str, folder: Household, *, minutes: float, seed: int) -> None:
        self._way, self._household, self._rng = way, folder, random.Random(seed)
        self._adapter = make_tiny_adapter(folder.folder / "adapter", WIDE_MODEL_PATH, seed=1, lora_alpha=1e-9)
        self._minutes = minutes
        self._until_s = 0.0
        self._ends: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._problems: list[str] = []
        self._slowest_s = 0.0
        self._workers: list[str] = []
        self._url = ""

    async def run(self) -> dict[str, Any]:
        self._start()  # in this thread: processes end with the one that started them
        began_s = time.monotonic()
        self._until_s = began_s + 60 * self._minutes
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(self._client(http) for _ in range(AT_ONCE)), self._disturb(http))
        took_s = time.monotonic() - began_s
        await asyncio.to_thread(self._settle)
        counters = {url: json.loads(httpx.get(f"{url}/check").text) for url in self._workers}
        return {
            "minutes": round(took_s / 60, 1),
            "ends": dict(self._ends),
            "events": dict(self._events),
            "errors": dict(self._errors.most_common(8)),
            "slowest_s": round(self._slowest_s, 1),
            "workers": {
                state["role"]: {name: int(state["counters"][name]) for name in COUNTED if name in state["counters"]}
                for state in counters.values()
            },
            "problems": self._problems[:10],
        }

    def _start(self) -> None:
        ports = free_ports(4)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        flags = (*COMMON, "--lora-paths", f"steady={self._adapter}", "--max-lora-rank", "8")
        if self._way == "unified":
            self._begin("unified", ["--tp-size", "2", "--pp-size", "2", *flags, *TIGHT], urls[0])
            self._url = urls[0]
        else:
            units = ("--kv-units", "2", "--disaggregation-kv-checksum")
            mode = (
                "--disaggregation-bootstrap-port",
                str(ports[3]),
                "--disaggregation-mode",
                "prefill",
                "--tp-size",
                "2",
            )
            self._begin("prefill", [*mode, *units, *flags, "--max-total-tokens", "8192"], urls[0])
            mode = ("--disaggregation-decode-retraction-backup", "prefill", "--disaggregation-mode", "decode")
            self._begin("decode", [*mode, *units, "--num-reserved-decode-tokens", "0", *flags, *TIGHT], urls[1])
        for part in list(self._household.parts.values()):
            wait_until(part.is_ready, within_s=READY_S, what=lambda part=part: part.log.read_text())  # type: ignore[misc]
        if self._way == "pd":
            ends = ["--prefill", urls[0], str(ports[3]), "--decode", urls[1]]
            self._begin_router(ends, urls[2])

    def _begin(self, name: str, flags: list[str], url: str) -> None:
        self._household.begin(name, ["serve", "--port", url.rpartition(":")[2], *flags], url=url)
        self._workers.append(url)

    def _begin_router(self, ends: list[str], url: str) -> None:
        self._household.begin(
            "router", ["router", *ends, "--port", url.rpartition(":")[2], "--log-level", "warning"], url=url
        )
        self._url = url

        def routable() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url}/readiness").status_code == 200
            return False

        wait_until(routable, within_s=READY_S, what="the router has found its workers")

    # ---- the clients

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while time.monotonic() < self._until_s and not self._problems:
            rng = random.Random(self._rng.random())
            began_s = time.monotonic()
            end, detail = await self._one(http, rng)
            self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)
            self._ends[end] += 1
            if end == "error":
                self._errors[detail[:120]] += 1
            elif end not in ("right", "left"):
                self._problems.append(f"{end}: {detail}"[:400])

    async def _one(self, http: aiohttp.ClientSession, rng: random.Random) -> tuple[str, str]:
        body, _ = recall_body(rng, rng.randint(5, LAST_PAIRS))
        new = rng.randint(1, LAST_NEW)
        body["sampling_params"] |= {"max_new_tokens": new, "ignore_eos": True}
        body["stream"] = rng.random() < 0.5
        if rng.random() < ADAPTED:
            body["lora_path"] = "steady"
        task = asyncio.create_task(self._ask(http, body, new))
        if rng.random() < ABORTS:
            await asyncio.wait({task}, timeout=rng.random() * 0.5)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return "left", ""
        return await task

    async def _ask(self, http: aiohttp.ClientSession, body: dict[str, Any], new: int) -> tuple[str, str]:
        try:
            async with asyncio.timeout(SLOW_S), http.post(f"{self._url}/generate", json=body) as response:
                return judge(response.status, await response.read(), body["input_ids"], new)
        except TimeoutError:
            return "hangs", f"no end within {SLOW_S:g} s"
        except (aiohttp.ClientError, ConnectionError) as error:
            return "cut", f"{type(error).__name__}: {error}"

    # ---- what happens meanwhile

    async def _disturb(self, http: aiohttp.ClientSession) -> None:
        rng = random.Random(self._rng.random())
        doings = (self._pause, self._pause, self._new_weights, self._adapters)
        while time.monotonic() < self._until_s and not self._problems:
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
        await self._control(
            http, rng.choice(self._workers), "update_weights_from_disk", {"model_path": WIDE_MODEL_PATH}
        )

    async def _adapters(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
        self._events["an adapter came and went"] += 1
        url = rng.choice(self._workers)
        await self._control(http, url, "load_lora_adapter", {"lora_name": "passing", "lora_path": self._adapter})
        await self._control(http, url, "unload_lora_adapter", {"lora_name": "passing"})

    async def _control(self, http: aiohttp.ClientSession, url: str, name: str, body: dict[str, Any]) -> None:
        status, answer = await post(http, f"{url}/{name}", body)
        assert status == 200, f"{name}: {answer}"

    def _settle(self) -> None:
        for url in self._workers:
            deadline_s = time.monotonic() + SETTLE_S
            while (left := left_over(json.loads(httpx.get(f"{url}/check", timeout=20.0).text))) is not None:
                if time.monotonic() > deadline_s:
                    self._problems.append(f"{url}: {left}")
                    break
                time.sleep(0.1)


def run(way: str, args: argparse.Namespace) -> dict[str, Any]:
    household = Household()
    soak = Soak(way, household, minutes=args.minutes, seed=args.seed)
    try:
        result = asyncio.run(soak.run())
        for part in household.parts.values():
            if text := part.log.read_text(errors="replace"):
                print(f"---- {part.name}\n{text[-3000:]}", file=sys.stderr)
    finally:
        left = household.close()
    result["problems"] += [f"left behind: {what}" for what in left]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.ranks.soak", description="a soak of ranks")
    parser.add_argument("--minutes", type=float, default=15.0, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=("unified", "pd"), default=("unified", "pd"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=REPORT)
    args = parser.parse_args()
    report, bad = begun(args.report, "soak"), False
    for way in args.ways:
        report["soak"][way] = found = run(way, args)
        print(f"{way}: {json.dumps(found, indent=1)}", flush=True)
        keep(report, args.report)
        bad |= bool(found["problems"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
