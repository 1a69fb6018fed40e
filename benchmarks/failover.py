"""What a client sees of the loss of a decode worker: the longest gap between two events of a stream that goes on at another.

usage: python -m benchmarks.failover [--rounds 3] [--streams 8] [--tokens 1500] [--prompt-tokens 64] [--only TEXT] [--output FILE]
       python -m benchmarks.failover --frozen 20 [--output FILE]

A prefill worker, two decode workers and a router, with the shipped model; KV by NIXL. All streams run when one of the decode workers is
killed (SIGKILL), frozen (SIGSTOP) or drained (SIGTERM). Streams of a drained one move with their KV; or, with --disable-kv-moves, a prefill
worker computes it again, with the prompt in its cache or without. The gap without a fault is that of the streams at the other worker.
Every stream's tokens are compared with those of a run without a fault.

`--frozen TRIES`: two prefill and two decode workers, of which one is frozen at a time and goes on later; from the freeze to the next token of each
client that has a request there: of a decode worker with streams, of a prefill worker with prompts, and of workers that were idle, which get
their first requests as they freeze.
"""

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tqdm import tqdm

from deploy.bench import environment
from deploy.bench.report import table
from tests.e2e.cluster import POLL_S, Started, several, tandem
from tools.family import family

FLAGS = ("--port", "0", "--max-total-tokens", "131072", "--num-threads", "1", "--log-level", "warning")
MODE = "--disaggregation-mode"
Gaps = list[float]  # milliseconds, the longest of each stream


@dataclass(frozen=True)
class Fault:
    """`forgets`: the prefill worker has no prefix of the streams any more."""

    signal: int
    flags: tuple[str, ...] = ()  # of the router
    forgets: bool = False


FAULTS = {
    "killed": Fault(signal.SIGKILL),
    "frozen": Fault(signal.SIGSTOP),
    "drained": Fault(signal.SIGTERM),
    "drained, KV computed again, prompt cached": Fault(signal.SIGTERM, ("--disable-kv-moves",)),
    "drained, KV computed again": Fault(signal.SIGTERM, ("--disable-kv-moves",), forgets=True),
}


@dataclass
class Stream:
    tokens: list[int]
    times: list[float]


@dataclass(frozen=True)
class Load:
    streams: int
    tokens: int
    prompt_tokens: int


def measure(fault: Fault, load: Load) -> tuple[Gaps, Gaps]:
    """Return the longest gap after the fault of streams that were moved, and of the others."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-failover-") as folder,
        started(Path(folder), fault.flags) as (router, prefill, decodes),
    ):
        return asyncio.run(_measure(router, prefill, decodes[0], fault, load))


@contextmanager
def started(folder: Path, router_flags: tuple[str, ...]) -> Iterator[tuple[Started, Started, list[Started]]]:
    with ExitStack() as stack:

        def serve(name: str, *flags: str) -> Started:
            return stack.enter_context(tandem(folder / name, "serve", *FLAGS, *flags))

        prefill = serve("p", MODE, "prefill", "--disaggregation-bootstrap-port", "0")
        decodes = [serve(f"d{i}", MODE, "decode") for i in range(2)]
        urls = [flag for worker in decodes for flag in ("--decode", worker.url)]
        flags = (
            "router",
            "--port",
            "0",
            "--pd-disaggregation",
            "--policy",
            "round_robin",
            "--prefill",
            prefill.url,
            *urls,
            *router_flags,
        )
        yield stack.enter_context(tandem(folder / "r", *flags)), prefill, decodes


async def _measure(router: Started, prefill: Started, lost: Started, fault: Fault, load: Load) -> tuple[Gaps, Gaps]:
    streams, tokens = load.streams, load.tokens
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        right = await _all(http, router.url, [Stream([], []) for _ in range(streams)], load)
        found = [Stream([], []) for _ in range(streams)]
        running = asyncio.ensure_future(_all(http, router.url, found, load))
        while min(len(stream.times) for stream in found) < tokens // 8 and not running.done():
            await asyncio.sleep(0.001)
        if fault.forgets:
            async with http.post(f"{prefill.url}/flush_cache") as answer:
                answer.raise_for_status()
        at = await _moved_by(http, lost, fault.signal)
        await running
    if [stream.tokens for stream in found] != [stream.tokens for stream in right]:
        raise AssertionError("a stream's tokens changed")
    gaps = sorted((_longest_ms(stream, since=at) for stream in found), reverse=True)
    return gaps[: streams // 2], gaps[streams // 2 :]  # round robin: half of them were there


async def _moved_by(http: aiohttp.ClientSession, worker: Started, number: int) -> float:
    """Send the signal to a worker's processes; return when."""
    leader = psutil.Process(worker.process.pid)
    at = time.monotonic()
    if number == signal.SIGTERM:
        leader.send_signal(number)
        return at
    for process in reversed(family(leader.pid)):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return at


async def _all(
    http: aiohttp.ClientSession, url: str, streams: list[Stream], load: Load, *, first: int = 0
) -> list[Stream]:
    """`first`: of the prompts, which all differ from their first token on."""
    await asyncio.gather(*(_read(http, url, i, stream, load) for i, stream in enumerate(streams, start=first)))
    return streams


async def _read(http: aiohttp.ClientSession, url: str, index: int, stream: Stream, load: Load) -> None:
    prompt = [1, *(16 + (index * 31 + 7 * t) % 256 for t in range(load.prompt_tokens))]
    sampling = {"max_new_tokens": load.tokens, "temperature": 0.8, "seed": index, "ignore_eos": True}
    async with http.post(
        f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling, "stream": True}
    ) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                stream.tokens[:] = json.loads(line[6:])["output_ids"]
                stream.times.append(time.monotonic())


def _longest_ms(stream: Stream, *, since: float) -> float:
    times = [since, *(at for at in stream.times if at > since)]
    return 1000 * max((b - a for a, b in pairwise(times)), default=0.0)


# ---- frozen workers

FREEZES = ("decode, with streams", "prefill, with prompts", "decode, idle", "prefill, idle")
STREAMS = 4  # half of them at the worker that freezes
FROZEN_TOKENS = 800
LONG_PROMPT = 1500  # tokens, in many chunks: some of it is computed when the worker freezes
FROZEN_S = 4.0


async def _frozen(tries: int, folder: Path) -> dict[str, list[float]]:
    """By case: milliseconds from a freeze to the next token of each client that the frozen worker had."""
    serve = ("serve", *FLAGS, "--chunked-prefill-size", "128", MODE)
    commands = {f"{role}{i}": (*serve, role) for role in ("prefill", "decode") for i in range(2)}
    commands |= {
        name: (*c, "--disaggregation-bootstrap-port", "0") for name, c in commands.items() if "prefill" in name
    }
    found: dict[str, list[float]] = {case: [] for case in FREEZES}
    with several(folder, commands) as workers:
        flags = ["router", "--port", "0", "--pd-disaggregation", "--policy", "round_robin"]
        flags += [word for name, worker in workers.items() for word in (f"--{name[:-1]}", worker.url)]
        with tandem(folder / "r", *flags) as router:
            timeout = aiohttp.ClientTimeout(total=600)
            async with aiohttp.ClientSession(timeout=timeout) as http:
                for number, case in enumerate(tqdm([case for _ in range(tries) for case in FREEZES], unit="freeze")):
                    await _until_well(http, router.url, workers)
                    role, _, state = case.partition(", ")
                    found[case] += await _freeze(http, router.url, workers[f"{role}0"], state, first=number * STREAMS)
    return found


async def _until_well(http: aiohttp.ClientSession, url: str, workers: dict[str, Started]) -> None:
    while True:
        async with http.get(f"{url}/workers") as answer:
            known = (await answer.json())["workers"]
        if sum(one["is_healthy"] and one["heartbeats"] for one in known) == len(workers):
            return
        await asyncio.sleep(POLL_S)


async def _freeze(http: aiohttp.ClientSession, url: str, worker: Started, state: str, *, first: int) -> list[float]:
    load = Load(STREAMS, FROZEN_TOKENS if state == "with streams" else 16, LONG_PROMPT if "prompts" in state else 64)
    streams = [Stream([], []) for _ in range(STREAMS)]
    running = None
    if state != "idle":
        running = asyncio.ensure_future(_all(http, url, streams, load, first=first))
        while not running.done() and not await _has_begun(http, url, worker, streams, state):
            await asyncio.sleep(0.002)
    at = await _moved_by(http, worker, signal.SIGSTOP)
    running = running or asyncio.ensure_future(_all(http, url, streams, load, first=first))
    asyncio.get_running_loop().call_later(FROZEN_S, _thaw, worker)
    await running
    await asyncio.sleep(max(0.0, at + FROZEN_S + POLL_S - time.monotonic()))
    waits = sorted(
        _longest_ms(stream, since=at) if state == "with streams" else _first_ms(stream, since=at) for stream in streams
    )
    return waits[STREAMS // 2 :]  # round robin: half of them were there


async def _has_begun(http: aiohttp.ClientSession, url: str, worker: Started, streams: list[Stream], state: str) -> bool:
    if state == "with streams":
        return min(len(stream.times) for stream in streams) >= FROZEN_TOKENS // 8
    async with http.get(f"{url}/workers") as answer:
        return any(one["inflight_requests"] for one in (await answer.json())["workers"] if one["url"] == worker.url)


def _thaw(worker: Started) -> None:
    leader = psutil.Process(worker.process.pid)
    for process in family(leader.pid):
        process.send_signal(signal.SIGCONT)


def _first_ms(stream: Stream, *, since: float) -> float:
    return 1000 * max(0.0, stream.times[0] - since)


def render_frozen(rows: list[dict[str, Any]]) -> str:
    shown = [
        [row["case"], str(row["clients"]), *(f"{row[key]:.0f}" for key in ("p50_ms", "p99_ms", "max_ms"))]
        for row in rows
    ]
    return table(["frozen", "clients", "next token p50, ms", "p99", "longest"], shown)


def measure_frozen(tries: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tandem-frozen-") as folder:
        found = asyncio.run(_frozen(tries, Path(folder)))
    return [
        {
            "case": case,
            "clients": len(waits),
            "p50_ms": _quantile(waits, 0.5),
            "p99_ms": _quantile(waits, 0.99),
            "max_ms": max(waits),
        }
        for case, waits in found.items()
    ]


def render(result: dict[str, Any]) -> str:
    rows = [
        [
            row["fault"],
            str(row["streams"]),
            *(f"{row[key]:.0f}" for key in ("p50_ms", "p99_ms", "others_p50_ms", "others_p99_ms")),
        ]
        for row in result["rows"]
    ]
    return table(["a decode worker is", "streams moved", "gap p50, ms", "p99", "of the others p50", "p99"], rows)


def _quantile(values: Gaps, share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--frozen", type=int, default=0, metavar="TRIES", help="measure frozen workers, so often each")
    args = parser.parse_args()
    if args.frozen:
        rows = measure_frozen(args.frozen)
        print(render_frozen(rows))
        if args.output:
            args.output.write_text(json.dumps({"environment": environment.describe(), "frozen": rows}, indent=1))
        return
    load = Load(args.streams, args.tokens, args.prompt_tokens)
    gaps: dict[str, tuple[Gaps, Gaps]] = {fault: ([], []) for fault in FAULTS if args.only in fault}
    for fault in tqdm([fault for _ in range(args.rounds) for fault in gaps], unit="fault"):
        for all_gaps, more in zip(gaps[fault], measure(FAULTS[fault], load), strict=True):
            all_gaps += more
    rows = [
        {
            "fault": fault,
            "streams": len(moved),
            "p50_ms": _quantile(moved, 0.5),
            "p99_ms": _quantile(moved, 0.99),
            "others_p50_ms": _quantile(others, 0.5),
            "others_p99_ms": _quantile(others, 0.99),
        }
        for fault, (moved, others) in gaps.items()
    ]
    result = {"environment": environment.describe(), "prompt_tokens": args.prompt_tokens, "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
