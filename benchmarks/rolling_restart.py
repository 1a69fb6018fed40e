"""Goodput while every worker is restarted, one after the other, beside that of a cluster that is left alone.

usage: python -m benchmarks.rolling_restart [--rate 4] [--tokens 128] [--prompt-tokens 64] [--steady 20] [--ttft 1] [--itl 0.05] [--output FILE]

Two prefill and two decode workers of the shipped model and a router; KV by NIXL. Requests come at a fixed rate, whatever becomes of those before.
A restart is SIGTERM, the worker's own end (its requests move), and a start at the same address until the router sends to it again. Good is an
answer without an error, whose first token came within `--ttft` and whose tokens followed every `--itl` on average. Goodput counts the good
ones of those that were sent; a start takes seconds of one of the cores that all share, as it would not in a cluster.
"""

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.failover import FLAGS, MODE
from deploy.bench import environment
from deploy.bench.report import table
from deploy.launcher.ports import free_ports
from tests.e2e.cluster import POLL_S, Started, tandem

ROLES = ("prefill", "prefill", "decode", "decode")
END_S = 60.0


@dataclass
class Answer:
    """`times`: of its events, in seconds since it was sent."""

    times: list[float]
    tokens: int = 0
    error: str = ""

    def is_good(self, args: argparse.Namespace) -> bool:
        if self.error or self.tokens < args.tokens or self.times[0] > args.ttft:
            return False
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) <= args.itl

    def longest_gap(self) -> float:
        return max((b - a for a, b in pairwise([0.0, *self.times])), default=0.0)


class Worker:
    """A worker that can be restarted at its address."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._starts = folder, 0
        port, bootstrap = free_ports(2)
        self._flags = (*FLAGS[2:], MODE, role, "--port", str(port))
        if role == "prefill":
            self._flags += ("--disaggregation-bootstrap-port", str(bootstrap))
        self._stack = ExitStack()
        self.role = role
        self.started = self._start()

    def _start(self) -> Started:
        self._starts += 1
        return self._stack.enter_context(tandem(self._folder / str(self._starts), "serve", *self._flags))

    def restart(self) -> None:
        self.started.process.send_signal(signal.SIGTERM)
        self.started.process.wait(END_S)
        self._stack.close()
        self.started = self._start()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def started(folder: Path) -> Iterator[tuple[str, list[Worker]]]:
    with ExitStack() as stack:
        workers = []
        for i, role in enumerate(ROLES):
            workers.append(Worker(folder / str(i), role))
            stack.callback(workers[-1].close)
        urls = [word for worker in workers for word in (f"--{worker.role}", worker.started.url)]
        router = stack.enter_context(tandem(folder / "r", "router", "--port", "0", "--pd-disaggregation", *urls))
        yield router.url, workers


async def send(http: aiohttp.ClientSession, url: str, number: int, args: argparse.Namespace) -> Answer:
    prompt = [1, *(16 + (number * 31 + 7 * t) % 256 for t in range(args.prompt_tokens))]
    sampling = {"max_new_tokens": args.tokens, "temperature": 0.8, "seed": number, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    found, begin = Answer([]), time.monotonic()
    try:
        async with http.post(f"{url}/generate", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        found.error = str(event["error"])
                        break
                    found.tokens = len(event["output_ids"])
                    found.times.append(time.monotonic() - begin)
    except (aiohttp.ClientError, OSError) as error:
        found.error = repr(error)
    return found


async def load(
    http: aiohttp.ClientSession, url: str, args: argparse.Namespace, *, first: int, until: "asyncio.Future[Any]"
) -> list[Answer]:
    """Send until `until` is done; return the answers to all that were sent."""
    sent, begin = list[asyncio.Task[Answer]](), time.monotonic()
    while not until.done():
        sent.append(asyncio.create_task(send(http, url, first + len(sent), args)))
        await asyncio.sleep(max(0.0, begin + len(sent) / args.rate - time.monotonic()))
    return [await one for one in sent]


async def restart_all(http: aiohttp.ClientSession, url: str, workers: list[Worker]) -> list[float]:
    """Return how long each restart took, until the router knows that the worker is well."""
    taken = []
    for worker in workers:
        begin = time.monotonic()
        await asyncio.to_thread(worker.restart)
        await until_well(http, url, len(workers))
        taken.append(time.monotonic() - begin)
    return taken


async def until_well(http: aiohttp.ClientSession, url: str, number: int) -> None:
    while True:
        async with http.get(f"{url}/workers") as answer:
            if sum(one["is_healthy"] for one in (await answer.json())["workers"]) == number:
                return
        await asyncio.sleep(POLL_S)


async def measure(url: str, workers: list[Worker], args: argparse.Namespace) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        await until_well(http, url, len(workers))
        await load(http, url, args, first=0, until=asyncio.ensure_future(asyncio.sleep(3.0)))
        found: dict[str, Any] = {}
        for name in ("alone", "restarts"):
            work = asyncio.sleep(args.steady) if name == "alone" else restart_all(http, url, workers)
            until: asyncio.Future[Any] = asyncio.ensure_future(work)
            answers = await load(http, url, args, first=1000 * (1 + len(found)), until=until)
            found[name] = {
                "sent": len(answers),
                "good": sum(one.is_good(args) for one in answers),
                "errors": [one.error for one in answers if one.error],
                "ttft_s": sorted(one.times[0] for one in answers if one.times),
                "gaps_s": sorted(one.longest_gap() for one in answers),
                "restarts_s": until.result() or [],
            }
        return found


def render(found: dict[str, Any]) -> str:
    header = ["", "sent", "good", "goodput", "errors", "TTFT p50, p99, s", "longest gap p50, p99, s", "restarts, s"]
    lines = []
    for name, one in found.items():
        ttft, gaps = ((_quantile(one[what], 0.5), _quantile(one[what], 0.99)) for what in ("ttft_s", "gaps_s"))
        lines.append(
            [
                name,
                str(one["sent"]),
                str(one["good"]),
                f"{100 * one['good'] / one['sent']:.1f} %",
                str(len(one["errors"])),
                f"{ttft[0]:.2f}, {ttft[1]:.2f}",
                f"{gaps[0]:.2f}, {gaps[1]:.2f}",
                ", ".join(f"{taken:.0f}" for taken in one["restarts_s"]),
            ]
        )
    return table(header, lines)


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steady", type=float, default=20.0, help="seconds without restarts")
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--itl", type=float, default=0.05)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-rolling-") as folder, started(Path(folder)) as (url, workers):
        found = asyncio.run(measure(url, workers, args))
    print(render(found))
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment.describe(), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
