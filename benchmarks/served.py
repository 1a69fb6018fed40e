"""Measures what serves beside the engine: CPU time of a token outside it, and the start of processes."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil
import uvloop

from benchmarks.cluster import Cluster, answering, tandem_up
from benchmarks.cpu_use import SCHEDULER
from benchmarks.load import load
from benchmarks.measures import Tables, in_turns, used_s
from deploy.launcher.probe import free_ports

CHAT = {"model": "default", "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
OUTPUT_TOKENS = 256
CLIENTS = (1, 16, 64)
INTERVALS = {1: "each alone", 64: "64 at once"}  # tokens of an event
WARM_UP_S = 0.5
FORK_SERVER = "service.process.fork_server"  # of its command line


# ---- a token


def measure_tokens(*, seconds: float = 3.0, rounds: int = 3) -> Tables:
    """Chat streams through a pair; the schedulers and this client are not counted."""
    with tandem_up("--log-level", "error") as cluster:
        processes = beside_engines(cluster)
        ways = {
            (interval, clients): partial(
                _tokens, cluster.url, processes, clients=clients, interval=interval, seconds=seconds
            )
            for interval in INTERVALS
            for clients in CLIENTS
        }
        named = {f"{INTERVALS[i]}, {n} stream{'s' if n > 1 else ''}": way for (i, n), way in ways.items()}
        found = in_turns(named, rounds)
    return {"": [{"CPU us a token": name, **row} for name, row in found.items()]}


def beside_engines(cluster: Cluster) -> dict[str, list[psutil.Process]]:
    """Return a cluster's processes by what they do, without schedulers, their fork server and the launcher."""
    workers = {pid: role for role, pid in cluster.pids}
    up = psutil.Process(next(pid for role, pid in cluster.pids if role == "up"))
    found: dict[str, list[psutil.Process]] = {}
    for process in up.children(recursive=True):
        line = " ".join(process.cmdline())
        if SCHEDULER not in line and FORK_SERVER not in line:
            name = f"{workers[process.pid]} HTTP" if process.pid in workers else "router"
            found.setdefault(name, []).append(process)
    return dict(sorted(found.items()))


def _tokens(
    url: str, processes: Mapping[str, list[psutil.Process]], *, clients: int, interval: int, seconds: float
) -> dict[str, float]:
    fields = CHAT | {"messages": MESSAGES, "max_tokens": OUTPUT_TOKENS, "stream": True, "stream_interval": interval}
    body = json.dumps(fields | {"skip_special_tokens": False}).encode()  # every token has a text: each is an event
    uvloop.run(load(url, clients=clients, seconds=WARM_UP_S, stream=True, body=body))
    before_s = {name: used_s(some) for name, some in processes.items()}
    seen = uvloop.run(load(url, clients=clients, seconds=seconds, stream=True, body=body))
    tokens = len(seen.whole_s) * OUTPUT_TOKENS
    us = {name: 1e6 * (used_s(some) - before_s[name]) / tokens for name, some in processes.items()}
    return us | {
        "in all": sum(us.values()),
        "events a request": seen.events / len(seen.whole_s),
        "tokens/s": tokens / seconds,
        "first byte p50, ms": 1e3 * statistics.median(seen.first_byte_s),
    }


# ---- start

CLUSTERS = {
    "`tandem up --unified`": ["--unified"],
    "`tandem up`, nixl": [],
    "`tandem up`, mooncake": ["--transfer-backend", "mooncake"],
}
NO_WORKER = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
ALONE = {"`tandem router`": ["router", *NO_WORKER], "`tandem bootstrap`": ["bootstrap"]}


def measure_start(*, rounds: int = 5) -> Tables:
    """Seconds from the start of a process until it answers; raises where router or bootstrap server loads torch."""
    ways: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(_cluster_s, args) for name, args in CLUSTERS.items()
    }
    ways |= {name: partial(_alone_s, args) for name, args in ALONE.items()}
    found = in_turns(ways, rounds)
    return {"": [{"": name, f"p50 of {rounds}, s": row["s"]} for name, row in found.items()]}


def _cluster_s(args: list[str]) -> dict[str, float]:
    with tandem_up(*args) as cluster:
        return {"s": cluster.ready_s}


def _alone_s(args: list[str]) -> dict[str, float]:
    (port,) = free_ports(1)
    argv, begin_s = [sys.executable, "-m", "deploy", *args, "--port", str(port)], time.monotonic()
    with answering(argv, f"http://127.0.0.1:{port}/health") as process:
        taken_s = time.monotonic() - begin_s
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), f"{args[0]} has loaded torch"
    return {"s": taken_s}
