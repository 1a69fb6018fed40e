"""What a token costs outside the engine: CPU time of router and HTTP front ends for each token that is streamed.

usage: python -m benchmarks.token_path [--seconds S] [--rounds N] [--output FILE]

A cluster as `tandem up` starts it (one prefill, one decode worker, a router, the shipped model), chat streams of 256
tokens. "each alone": every token is an event as soon as the engine has made it; "64 at once": `stream_interval` is 64,
so an event holds 64 tokens. Everything that these processes do while the load runs is counted, also what a request
costs once, and health checks and reports. The engine's own processes (schedulers) and the client are not.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.cluster import Cluster, tandem_up
from benchmarks.router_load import Seen, load
from deploy.bench.environment import describe
from deploy.bench.report import table

OUTPUT_TOKENS = 256
CLIENTS = (1, 16, 64)
INTERVALS = {1: "each alone", 64: "64 at once"}
FIGURES = ("all_us", "tokens_per_s", "first_byte_ms", "events_per_request")
WARM_UP_S = 0.5
SCHEDULER, FORK_SERVER = "disagg.scheduler_process", "service.process.fork_server"  # of their command lines


class Processes:
    """The processes of a cluster by what they do; schedulers, their fork server and the launcher are left out."""

    def __init__(self, cluster: Cluster) -> None:
        workers = {pid: role for role, pid in cluster.pids}
        up = psutil.Process(next(pid for role, pid in cluster.pids if role == "up"))
        self.named: list[tuple[str, psutil.Process]] = []
        for process in up.children(recursive=True):
            if (name := self._name(process, workers)) is not None:
                self.named.append((name, process))

    def _name(self, process: psutil.Process, workers: dict[int, str]) -> str | None:
        line = " ".join(process.cmdline())
        if SCHEDULER in line or FORK_SERVER in line:
            return None
        return f"{workers[process.pid]} HTTP" if process.pid in workers else "router"

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far."""
        used: dict[str, float] = {}
        for name, process in self.named:
            times = process.cpu_times()
            used[name] = used.get(name, 0.0) + times.user + times.system
        return used


def body(interval: int) -> bytes:
    """A chat that streams `OUTPUT_TOKENS` tokens, every `interval` of them an event."""
    fields = {
        "model": "default",
        "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,  # every token has a text, so every token is an event
        "stream": True,
        "stream_interval": interval,
    }
    return json.dumps(fields).encode()


def sample(cluster: Cluster, processes: Processes, *, clients: int, interval: int, seconds: float) -> dict[str, Any]:
    """CPU microseconds a token under one load."""
    uvloop.run(load(cluster.url, clients=clients, seconds=WARM_UP_S, stream=True, body=body(interval)))
    before = processes.cpu_s()
    seen: Seen = uvloop.run(load(cluster.url, clients=clients, seconds=seconds, stream=True, body=body(interval)))
    tokens = len(seen.whole_s) * OUTPUT_TOKENS
    us = {name: (used - before[name]) / tokens * 1e6 for name, used in processes.cpu_s().items()}
    return {
        "us": us,
        "all_us": sum(us.values()),
        "tokens_per_s": tokens / seconds,
        "first_byte_ms": statistics.median(seen.first_byte_s) * 1e3,
        "events_per_request": seen.events / len(seen.whole_s),
    }


def measure(*, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Every load in turns; medians over the rounds."""
    samples: dict[tuple[int, int], list[dict[str, Any]]] = {}
    with tandem_up("--log-level", "error") as cluster:
        processes = Processes(cluster)
        for _ in range(rounds):
            for interval in INTERVALS:
                for clients in CLIENTS:
                    one = sample(cluster, processes, clients=clients, interval=interval, seconds=seconds)
                    samples.setdefault((interval, clients), []).append(one)
                    print(json.dumps({"clients": clients, "interval": interval, **one}), file=sys.stderr, flush=True)
    return [_row(interval, clients, taken) for (interval, clients), taken in samples.items()]


def _row(interval: int, clients: int, taken: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(taken[0]["us"])
    return {
        "interval": interval,
        "clients": clients,
        "us": {name: statistics.median(one["us"][name] for one in taken) for name in names},
        **{name: statistics.median(one[name] for one in taken) for name in FIGURES},
    }


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    names = sorted(result["rows"][0]["us"])
    header = ["CPU us a token", *names, "in all", "events a request", "tokens/s", "first byte p50, ms"]
    rows = [
        [
            f"{INTERVALS[row['interval']]}, {row['clients']} stream{'s' if row['clients'] > 1 else ''}",
            *(f"{row['us'][name]:.1f}" for name in names),
            f"{row['all_us']:.1f}",
            f"{row['events_per_request']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['first_byte_ms']:.1f}",
        ]
        for row in result["rows"]
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result = {"environment": describe(), "rows": measure(seconds=args.seconds, rounds=args.rounds)}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
