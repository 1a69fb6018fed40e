"""What a client sees of the loss of a decode worker: the longest gap between two events of a stream that goes on at another.

usage: python -m benchmarks.failover [--rounds 3] [--streams 8] [--tokens 1500] [--prompt-tokens 64] [--only TEXT] [--output FILE]

A prefill worker, two decode workers and a router, with the shipped model; KV by NIXL. All streams run when one of the decode workers is
killed (SIGKILL), frozen (SIGSTOP) or drained (SIGTERM). Streams of a drained one move with their KV; or, with --disable-kv-moves, a prefill
worker computes it again, with the prompt in its cache or without. The gap without a fault is that of the streams at the other worker.
Every stream's tokens are compared with those of a run without a fault.
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
from tests.e2e.cluster import Started, tandem

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
    for process in (*leader.children(recursive=True), leader):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return at


async def _all(http: aiohttp.ClientSession, url: str, streams: list[Stream], load: Load) -> list[Stream]:
    await asyncio.gather(*(_read(http, url, i, stream, load) for i, stream in enumerate(streams)))
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
    args = parser.parse_args()
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
