"""What --rebalance-above saves: retractions of a decode worker that has the long answers, and the gaps that its clients see.

usage: python -m benchmarks.rebalance [--rounds 3] [--streams 16] [--tokens 1200] [--memory 8192] [--output FILE]

A prefill worker, two decode workers of `--memory` tokens each and a router that goes round: every second stream is long (`--tokens`), and
all of these are at one decode worker, whose memory they exceed together; the others have 32 tokens. KV by NIXL, the shipped model.
Every stream's tokens are compared with those of the first run.
"""

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmarks.failover import Stream
from deploy.bench import environment
from deploy.bench.report import table
from tests.e2e.cluster import Started, tandem

FLAGS = ("--port", "0", "--num-threads", "1", "--log-level", "warning", "--disaggregation-mode")
SHORT = 32
SHARES = (0.0, 0.8)
MOVED = 'tandem_router_failovers_total{.*result="moved".*}'
RETRACTED = "tandem_num_retractions_total{.*}"


@dataclass
class Found:
    retractions: float
    moves: float
    all_s: float
    gaps_ms: list[float]  # the longest of each long stream


@contextmanager
def started(folder: Path, *, memory: int, above: float) -> Iterator[tuple[Started, list[Started]]]:
    with ExitStack() as stack:

        def serve(name: str, role: str, tokens: int) -> Started:
            flags = (*FLAGS, role, "--max-total-tokens", str(tokens), "--disaggregation-bootstrap-port", "0")
            return stack.enter_context(tandem(folder / name, "serve", *flags))

        prefill = serve("p", "prefill", 65536)
        decodes = [serve(f"d{i}", "decode", memory) for i in range(2)]
        flags = ("--port", "0", "--pd-disaggregation", "--policy", "round_robin", "--prefill", prefill.url)
        urls = [flag for worker in decodes for flag in ("--decode", worker.url)]
        more = ("--load-poll-interval", "0.1", "--rebalance-above", str(above))
        yield stack.enter_context(tandem(folder / "r", "router", *flags, *urls, *more)), decodes


async def _measure(router: Started, decodes: list[Started], streams: list[Stream], tokens: int) -> Found:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        began_s = time.monotonic()
        reads = []
        for index, stream in enumerate(streams):
            reads.append(asyncio.ensure_future(_read(http, router.url, index, stream, SHORT if index % 2 else tokens)))
            await asyncio.sleep(0.02)  # they go round in this order
        await asyncio.gather(*reads)
        all_s = time.monotonic() - began_s
        retractions = sum([await _metric(http, worker.url, RETRACTED) for worker in decodes])
        gaps = [1000 * max(b - a for a, b in pairwise(stream.times)) for stream in streams[::2]]
        return Found(retractions, await _metric(http, router.url, MOVED), all_s, gaps)


async def _read(http: aiohttp.ClientSession, url: str, index: int, stream: Stream, tokens: int) -> None:
    prompt = [1, *(16 + (index * 31 + 7 * t) % 256 for t in range(64))]
    sampling = {"max_new_tokens": tokens, "temperature": 0.8, "seed": index, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    async with http.post(f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                stream.tokens[:] = json.loads(line[6:])["output_ids"]
                stream.times.append(time.monotonic())


async def _metric(http: aiohttp.ClientSession, url: str, pattern: str) -> float:
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return sum(map(float, re.findall(rf"^{pattern} ([\d.e+]+)$", text, re.MULTILINE)))


def measure(above: float, *, num_streams: int, tokens: int, memory: int) -> tuple[Found, list[list[int]]]:
    streams = [Stream([], []) for _ in range(num_streams)]
    with (
        tempfile.TemporaryDirectory(prefix="tandem-rebalance-") as folder,
        started(Path(folder), memory=memory, above=above) as (router, decodes),
    ):
        found = asyncio.run(_measure(router, decodes, streams, tokens))
    return found, [stream.tokens for stream in streams]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--memory", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: dict[float, list[Found]] = {above: [] for above in SHARES}
    right: list[list[int]] | None = None
    for above in tqdm([above for _ in range(args.rounds) for above in SHARES], unit="run"):
        one, tokens = measure(above, num_streams=args.streams, tokens=args.tokens, memory=args.memory)
        right = right or tokens
        if tokens != right:
            raise AssertionError("a stream's tokens changed")
        found[above].append(one)
    rows: list[dict[str, Any]] = []
    for above, runs in found.items():
        gaps = sorted(gap for run in runs for gap in run.gaps_ms)
        rows.append(
            {
                "above": above,
                "retractions": sum(run.retractions for run in runs) / len(runs),
                "moves": sum(run.moves for run in runs) / len(runs),
                "all_s": sum(run.all_s for run in runs) / len(runs),
                "gap_p50_ms": gaps[len(gaps) // 2],
                "gap_p90_ms": gaps[round(0.9 * (len(gaps) - 1))],
                "gap_max_ms": gaps[-1],
            }
        )
    titles = ["--rebalance-above", "retractions", "moves", "all done, s", "longest gap p50, ms", "p90", "max"]
    print(
        table(
            titles,
            [[f"{value:g}" if i < 1 else f"{value:.1f}" for i, value in enumerate(row.values())] for row in rows],
        )
    )
    if args.output:
        args.output.write_text(json.dumps({"environment": environment.describe(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
