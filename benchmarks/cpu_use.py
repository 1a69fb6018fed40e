"""Who used this machine's cores for a while: schedulers, what serves beside them, and everybody else. From /proc, by psutil.

usage: python -m benchmarks.cpu_use [--seconds 60] [--settle 5] [--workers N] [--threads] [--output FILE]

As a program: what a cluster uses that has answered one request and rests, by process: a prefill and a decode worker and a router with the shipped model.
`--workers`: processes of the router.
"""

import argparse
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deploy.bench import environment
from deploy.bench.report import table
from tests.e2e.cluster import cluster

SCHEDULER = "disagg.scheduler_process"  # of its command line


@dataclass(slots=True)
class CpuUse:
    """CPU seconds; `wall_s`: of the clock. `steps_s`: schedulers (steps and transfers); `beside_s`: this process and its other

    descendants (routers, HTTP, the load's own client); `others_s`: everybody else.
    """

    wall_s: float = 0.0
    steps_s: float = 0.0
    beside_s: float = 0.0
    others_s: float = 0.0

    @property
    def cores_left(self) -> float:
        """Cores of the machine that were not taken by others."""
        return (os.cpu_count() or 1) - self.others_s / self.wall_s


@contextmanager
def cpu_use() -> Iterator[CpuUse]:
    """Filled in when the block ends. Processes that start or end within it are not counted as ours."""
    found = CpuUse()
    begin_s, all_s, ours = time.monotonic(), _all_s(), _ours()
    yield found
    found.wall_s = time.monotonic() - begin_s
    for pid, (name, used_s) in _ours().items():
        if pid in ours:
            taken_s = used_s - ours[pid][1]
            found.steps_s += taken_s if SCHEDULER in name else 0.0
            found.beside_s += 0.0 if SCHEDULER in name else taken_s
    found.others_s = max(0.0, _all_s() - all_s - found.steps_s - found.beside_s)


def _all_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _ours() -> dict[int, tuple[str, float]]:
    """By process: command line, CPU seconds of its own (not of its children)."""
    found = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
            found[process.pid] = (" ".join(process.cmdline()), times.user + times.system)
        except psutil.NoSuchProcess:
            continue
    return found


Ran = dict[str, tuple[float, int]]  # by thread: CPU seconds, times that it ran


def measure_idle(flags: list[str], *, settle_s: float, seconds: float) -> list[tuple[str, Ran]]:
    """By process of a cluster that has answered a request and rests: its name, and what its threads used within `seconds`."""
    with tempfile.TemporaryDirectory(prefix="tandem-idle-") as folder, cluster(Path(folder), *flags) as c:
        body = json.dumps({"input_ids": [20] * 40, "sampling_params": {"max_new_tokens": 8}}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{c.router}/generate", body, headers)) as answer:
            answer.read()
        time.sleep(settle_s)
        launcher = psutil.Process(c.launcher.pid)
        pids = {process.pid: _name(process) for process in launcher.children(recursive=True)}
        before, begin_s = {pid: _ran(pid) for pid in pids}, time.monotonic()
        time.sleep(seconds)
        after, taken_s = {pid: _ran(pid) for pid in pids}, time.monotonic() - begin_s
    found = []
    for pid, name in pids.items():
        gone = (0.0, 0)
        threads = {
            thread: ((ran_s - before[pid].get(thread, gone)[0]) / taken_s, times - before[pid].get(thread, gone)[1])
            for thread, (ran_s, times) in after[pid].items()
        }
        found.append((name, threads))
    return found


def _ran(pid: int) -> Ran:
    """From the scheduler's own clock, which counts nanoseconds."""
    found: Ran = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        ran_ns, _, times = map(int, (task / "schedstat").read_text().split())
        found[f"{(task / 'comm').read_text().strip()} {task.name}"] = (ran_ns / 1e9, times)
    return found


def _name(process: psutil.Process) -> str:
    words = [word for word in process.cmdline() if word]
    kind = next((word for word in words if word in ("router", "serve") or "_process" in word), words[-1])
    role = next((role for role in ("prefill", "decode") if any(f'{role}"' in w or w == role for w in words)), "")
    return f"{role} {kind}".strip()


def render(found: list[tuple[str, Ran]], *, threads: bool) -> str:
    rows = []
    for name, ran in found:
        rows.append([name, *_figures(ran)])
        busiest = sorted(ran.items(), key=lambda item: -item[1][0])[:6] if threads else []
        rows += [[f"  {thread}", *_figures({thread: used})] for thread, used in busiest]
    rows.append(
        ["all", *_figures({f"{i} {thread}": used for i, (_, ran) in enumerate(found) for thread, used in ran.items()})]
    )
    return table(["process", "% of a core", "times that it ran"], rows)


def _figures(ran: Ran) -> list[str]:
    return [f"{100 * sum(share for share, _ in ran.values()):.3f}", str(sum(times for _, times in ran.values()))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", action="store_true", help="the busiest threads of each process, too")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    flags = ["--prefill", "1", "--decode", "1", "--max-total-tokens", "65536", "--log-level", "warning"]
    if args.workers > 1:
        flags += ["--router-arg", f"--workers={args.workers}"]
    found = measure_idle(flags, settle_s=args.settle, seconds=args.seconds)
    print(render(found, threads=args.threads))
    if args.output:
        result: dict[str, Any] = {"environment": environment.describe(), "seconds": args.seconds, "processes": found}
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
