"""Decode steps beside a neighbour that takes a share of the cores, in turns within one run.

usage: python -m benchmarks.neighbour [--layers 8] [--threads 1 2] [--cores-taken 0 0.5 1 1.5 1.7] [--batches 1 16] [--rounds 7]
       [--seconds 0.7] [--against CHECKOUT] [--output FILE]

Each way (a number of threads, of this checkout or of the one to compare with) has a process of its own with a random checkpoint of
Qwen3-0.6B's layers; they step in turns. The neighbour burns CPU time of its own account: a whole core without a pause, a share of one in
turns of a few ms. Figures are medians over rounds; ratios are taken within a round. `CPU` is what the steps' process used, `it got` what the
neighbour did, both in cores; `best` is the fastest step, which on a busy machine says most about a quiet one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import Process
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table
from disagg.children import SPINS

ROOT = Path(__file__).resolve().parents[1]
STEPS = Path(__file__).with_name("neighbour_steps.py")
TURN_S = 0.004  # a neighbour with a share of a core: so long are its turns, of work and pause
SETTLE_S = 0.05  # of a neighbour, before steps count
TOKENS = 128  # of each request in the cache


def burn(share: float, turn_s: float = TURN_S) -> None:
    """Use `share` of a core: of each turn so much CPU time, as far as the kernel gives it."""
    while True:
        end, used = time.perf_counter() + turn_s, time.process_time() + share * turn_s
        while time.process_time() < used:
            pass
        time.sleep(max(0.0, end - time.perf_counter()) if share < 1 else 0)


def shares_of(cores: float) -> list[float]:
    """A share for each neighbour: whole cores first; 1.7 are two alike, which no core of two escapes."""
    whole = int(cores)
    rest = cores - whole
    if whole and rest > 0.5:
        return [cores / (whole + 1)] * (whole + 1)
    return [1.0] * whole + ([rest] if rest > 0 else [])


@contextmanager
def neighbours(cores: float) -> Iterator[list[Process]]:
    running = [Process(target=burn, args=(share,), daemon=True) for share in shares_of(cores)]
    for one in running:
        one.start()
    try:
        time.sleep(SETTLE_S)
        yield running
    finally:
        for one in running:
            one.kill()
            one.join()


def cpu_s(process: Process) -> float:
    """User and system time of a process that runs."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Way:
    """A checkout and a number of threads."""

    name: str
    checkout: Path
    threads: int


class Steps:
    """The process of a way."""

    def __init__(self, way: Way, folder: str) -> None:
        spins = os.environ.get("GOMP_SPINCOUNT", SPINS)
        env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": spins, "OMP_NUM_THREADS": str(way.threads)}
        env |= {"PYTHONPATH": str(way.checkout)}
        argv = [sys.executable, "-P", str(STEPS), folder, str(way.threads), str(TOKENS)]
        self.way = way
        self._process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, batch: int, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"batch": batch, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(
    steps: Sequence[Steps], *, taken: Sequence[float], batches: Sequence[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """A row for each measurement: way, batch, cores taken, round."""
    rows = []
    for one in steps:
        for batch in batches:
            one.run(batch, 0.01)
    with tqdm(total=rounds * len(batches) * len(taken) * len(steps), disable=None) as bar:
        for number in range(rounds):
            for batch in batches:
                for cores in taken:
                    for one in steps if number % 2 == 0 else reversed(steps):
                        rows.append(_measured(one, batch, cores, seconds) | {"round": number})
                        bar.update()
    return rows


def _measured(one: Steps, batch: int, cores: float, seconds: float) -> dict[str, Any]:
    with neighbours(cores) as running:
        before, begin = sum(map(cpu_s, running)), time.perf_counter()
        found = one.run(batch, seconds)
        used = (sum(map(cpu_s, running)) - before) / (time.perf_counter() - begin)
    rate = found["steps"] / found["wall_s"]
    cpu = found["cpu_s"] / found["wall_s"]
    return {
        "way": one.way.name,
        "threads": one.way.threads,
        "batch": batch,
        "taken": cores,
        "got": used,
        "rate": rate,
        "cpu": cpu,
        "cpu_ms": 1000 * found["cpu_s"] / found["steps"],
        "median_ms": found["median_ms"],
        "best_ms": found["best_ms"],
    }


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each way, batch and share: medians, and the ratios to the same way without a neighbour and to the first way."""
    found = []
    first = rows[0]["way"], rows[0]["threads"]
    by_key = {(r["way"], r["threads"], r["batch"], r["taken"], r["round"]): r for r in rows}
    kinds = dict.fromkeys((r["way"], r["threads"], r["batch"], r["taken"]) for r in rows)
    for way, threads, batch, taken in kinds:
        own = [r for r in rows if (r["way"], r["threads"], r["batch"], r["taken"]) == (way, threads, batch, taken)]
        least = min(r["taken"] for r in rows)
        kept = [r["rate"] / by_key[way, threads, batch, least, r["round"]]["rate"] for r in own]
        over_first = [r["rate"] / by_key[*first, batch, taken, r["round"]]["rate"] for r in own]
        figures = {name: median(r[name] for r in own) for name in ("got", "rate", "cpu", "cpu_ms", "median_ms")}
        figures["best_ms"] = min(r["best_ms"] for r in own)
        kind = {"way": way, "threads": threads, "batch": batch, "taken": taken}
        found.append(kind | figures | {"kept": median(kept), "over_first": median(over_first)})
    return found


def render(result: dict[str, Any]) -> str:
    rows = [
        [
            r["way"],
            str(r["threads"]),
            str(r["batch"]),
            f"{r['taken']:g}",
            f"{r['got']:.2f}",
            f"{r['rate']:.1f}",
            f"{100 * r['kept']:.0f} %",
            f"{r['cpu']:.2f}",
            f"{r['cpu_ms']:.1f}",
            f"{r['best_ms']:.1f}",
            f"{r['over_first']:.2f}",
        ]
        for r in sorted(result["summaries"], key=lambda r: (r["batch"], r["taken"], r["way"], r["threads"]))
    ]
    head = [
        "checkout",
        "threads",
        "batch",
        "taken",
        "it got",
        "steps/s",
        "kept",
        "CPU",
        "CPU ms a step",
        "best, ms",
        "over the first",
    ]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cores-taken", nargs="+", type=float, default=[0, 0.5, 1, 1.5, 1.7])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    checkouts = [("before", args.against.resolve())] if args.against else []
    checkouts.append(("here", ROOT))
    ways = [Way(name, checkout, threads) for name, checkout in checkouts for threads in args.threads]
    with tempfile.TemporaryDirectory(prefix="tandem-neighbour-") as folder, ExitStack() as stack:
        write_model(Path(folder), layers=args.layers)
        steps = [Steps(way, folder) for way in ways]
        for one in steps:
            stack.callback(one.close)
        rows = measure(steps, taken=args.cores_taken, batches=args.batches, rounds=args.rounds, seconds=args.seconds)
    result = {"environment": environment.describe(), "summaries": summaries(rows), "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
