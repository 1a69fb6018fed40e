"""What a router costs: CPU time per request and per event, and what it adds to the first byte; ours beside SGLang's.

usage: python -m benchmarks.router_cost [--seconds S] [--rounds N] [--output FILE] [--only NAME]

One prefill and one decode worker that answer at once (benchmarks/instant_worker.py; prefill has one event), bodies of 300
bytes, streams of 64 events. The routers are measured in turns within one run; CPU time is user + system of a router's whole process tree.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.router_load import Seen, load
from deploy.bench.environment import describe
from deploy.launcher.ports import free_ports

START_S = 60.0
WARM_UP_S = 0.5
EVENTS = 64


@dataclass(frozen=True)
class Case:
    """One load. `pause_ms`: between a stream's events; None: whole answers."""

    name: str
    clients: int
    pause_ms: float | None


CASES = (
    Case("whole answers, 1 client", 1, None),
    Case("whole answers, 16 clients", 16, None),
    Case("64 events at once, 16 clients", 16, 0.0),
    Case("64 events, one every 5 ms, 1 client", 1, 5.0),
    Case("64 events, one every 5 ms, 16 clients", 16, 5.0),
)


def tandem(port: int, prefill: int, decode: int) -> list[str]:
    """Our router."""
    return [
        *(sys.executable, "-m", "deploy", "router", "--pd-disaggregation", "--port", str(port), "--log-level", "error"),
        *("--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"),
    ]


def sglang(port: int, prefill: int, decode: int) -> list[str]:
    """SGLang's router (Rust, from PyPI)."""
    (metrics,) = free_ports(1)
    return [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "random"),
        *("--prefill", f"http://127.0.0.1:{prefill}", "8998", "--decode", f"http://127.0.0.1:{decode}"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"),
    ]


ROUTERS = {"tandem": tandem, "sglang-router": sglang}


@contextmanager
def running(argv: list[str], port: int, path: str = "/health") -> Iterator[psutil.Process]:
    """A process that answers on `port`, ended with the block."""
    process = subprocess.Popen(argv, stdout=sys.stderr)
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}{path}"):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"did not start: {' '.join(argv)}")
            time.sleep(0.05)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def cpu_s(process: psutil.Process) -> float:
    """User and system time of a process tree."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def measure(case: Case, *, seconds: float, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    """Each router, and none, in turns; medians over the rounds."""
    pause_ms = case.pause_ms or 0.0
    ports = free_ports(2 + len(names))
    with ExitStack() as stack:
        prefill = ["--mode", "prefill", "--events", "1"]
        decode = ["--mode", "decode", "--events", str(EVENTS), "--pause-ms", str(pause_ms)]
        for port, flags in zip(ports, (prefill, decode), strict=False):
            argv = [sys.executable, "-m", "benchmarks.instant_worker", str(port), *flags]
            stack.enter_context(running(argv, port))
        routers = {
            name: (port, stack.enter_context(running(ROUTERS[name](port, *ports[:2]), port, "/readiness")))
            for name, port in zip(names, ports[2:], strict=True)
        }
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in ("direct", *names)}
        for _ in range(rounds):
            samples["direct"].append(_sample(case, ports[1], None, seconds))
            for name, (port, process) in routers.items():
                samples[name].append(_sample(case, port, process, seconds))
    return [{"case": case.name, "router": name, **_medians(rows)} for name, rows in samples.items()]


def _sample(case: Case, port: int, process: psutil.Process | None, seconds: float) -> dict[str, float]:
    url, stream = f"http://127.0.0.1:{port}", case.pause_ms is not None
    uvloop.run(load(url, clients=case.clients, seconds=WARM_UP_S, stream=stream))
    before_s, begin_s = cpu_s(process) if process else 0.0, time.perf_counter()
    seen: Seen = uvloop.run(load(url, clients=case.clients, seconds=seconds, stream=stream))
    used_s, wall_s = (cpu_s(process) if process else 0.0) - before_s, time.perf_counter() - begin_s
    requests = len(seen.whole_s)
    return {
        "requests_per_s": requests / wall_s,
        "cpu_us_per_request": used_s / requests * 1e6,
        "cpu_us_per_event": used_s / seen.events * 1e6 if seen.events else 0.0,
        "first_byte_p50_ms": statistics.median(seen.first_byte_s) * 1e3,
        "first_byte_p99_ms": statistics.quantiles(seen.first_byte_s, n=100)[98] * 1e3 if requests > 1 else 0.0,
        "whole_p50_ms": statistics.median(seen.whole_s) * 1e3,
    }


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def render(result: dict[str, Any]) -> str:
    """Write the section of docs/reports/benchmarks.md."""
    lines = [
        "| load | router | requests/s | CPU us/request | CPU us/event | first byte p50 ms | p99 ms |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        none = row["router"] == "direct"
        event = "" if none or not row["cpu_us_per_event"] else f"{row['cpu_us_per_event']:.1f}"
        lines.append(
            f"| {row['case']} | {row['router']} | {row['requests_per_s']:.0f} | "
            f"{'' if none else format(row['cpu_us_per_request'], '.0f')} | {event} | "
            f"{row['first_byte_p50_ms']:.2f} | {row['first_byte_p99_ms']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(ROUTERS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    names = [args.only] if args.only else list(ROUTERS)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows += measure(case, seconds=args.seconds, rounds=args.rounds, names=names)
        print(render({"rows": rows}).splitlines()[-1 - len(names) :], file=sys.stderr)
    result = {"environment": describe(), "cases": [asdict(case) for case in CASES], "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
