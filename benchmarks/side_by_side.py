"""Two source trees in one run, in turns: what a change of the code costs or gains.

usage: python -m benchmarks.side_by_side OLD NEW [--rounds 7] [--requests 6] [--backend nixl] [--output FILE]

OLD and NEW are checkouts; both use the libraries of this interpreter. Each round measures one tree and then the other, and
the next round goes the other way, so what drifts on the machine (heat, neighbours) falls on both alike.

    TTFT, ITL      p50 of one request in flight through a PD cluster of each tree
    goodput        requests a second within --slo-ttft and --slo-tpot, --clients at once
    scheduler      CPU time of a decode step of 256 requests, the pure core alone (benchmarks.scheduler_step)
    router         CPU time of a request, and of an event of a stream (benchmarks.router_path), the least of many windows

Both clusters are up at the same time. The engine of each prefill worker has a core for itself, everything else shares the
other one: decode, HTTP, routers and this client. The pools are full before anything is measured, so no request gets memory
that was never touched. A figure is the median over the rounds; the spread is that of the rounds' own ratios.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.cluster import Cluster, load, load_records, pin_tree, tandem_up
from benchmarks.cpu_use import SCHEDULER
from deploy.bench import environment
from deploy.bench.load import Measured
from deploy.bench.report import table
from deploy.bench.stats import RequestRecord, tpot_s
from tools.family import family

PREFILL_CORE, OTHER_CORE = 0, 1
PROMPT_LENS = (64, 512, 2048)
POOL_TOKENS = 16384
BUSY = {"input_len": 256, "output_len": 32}
EVENTS = 64  # of a stream in benchmarks.router_path

Sample = dict[str, float]  # metric -> figure of one tree in one round
Trees = dict[str, Path]

SCHEDULER_STEP = """
from benchmarks.scheduler_step import decode_step
found = decode_step(256, 0, steps={steps}, policy="fcfs")
print(found["step_p50_us"], found["step_min_us"])
"""
ROUTER_PATH = """
import time
from contextlib import AsyncExitStack
import uvloop
from benchmarks.router_path import WINDOW, _build

async def least_us(stream):
    async with AsyncExitStack() as stack:
        client = await _build(stack, stream=stream)
        await client.serve(10 * WINDOW)
        until_s, windows = time.perf_counter() + {seconds}, []
        while time.perf_counter() < until_s:
            before_s = time.process_time()
            await client.serve(WINDOW)
            windows.append((time.process_time() - before_s) / WINDOW * 1e6)
        return min(windows)

for stream in (False, True):
    print(uvloop.run(least_us(stream)))
"""


def main() -> None:
    args = _arguments()
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    samples: dict[str, list[Sample]] = {"old": [], "new": []}
    for collect in (_clusters, _scheduler, _router):
        for number, round_samples in enumerate(collect(trees, args)):
            for name, sample in round_samples.items():
                samples[name] += [{}] * (number + 1 - len(samples[name]))
                samples[name][number] = samples[name][number] | sample
    result = {
        "environment": environment.describe(),
        "commits": {name: _commit(tree) for name, tree in trees.items()},
        "rows": _rows(samples),
    }
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=6, help="of each prompt length, for each tree, in a round")
    parser.add_argument("--clients", type=int, default=4, help="requests in flight of the goodput")
    parser.add_argument("--slo-ttft", type=float, default=1.0, help="seconds")
    parser.add_argument("--slo-tpot", type=float, default=0.05, help="seconds")
    parser.add_argument("--backend", default="nixl", choices=("nixl", "mooncake"))
    parser.add_argument("--model-path", help="default: the model that ships with Tandem")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _clusters(trees: Trees, args: argparse.Namespace) -> Iterator[dict[str, Sample]]:
    flags = ["--transfer-backend", args.backend, "--num-threads", "1", "--max-total-tokens", str(POOL_TOKENS)]
    flags += ["--model-path", args.model_path] if args.model_path else []
    with (
        tandem_up(*flags, tree=trees["old"]) as old,
        tandem_up(*flags, tree=trees["new"]) as new,
        _on_core(OTHER_CORE),
    ):
        clusters = {"old": old, "new": new}
        for cluster in clusters.values():
            _pin(cluster)
            _fill_pool(cluster)
        for number in tqdm(range(args.rounds), unit="round", desc="clusters"):
            yield _cluster_round(clusters, number, args)


def _cluster_round(clusters: dict[str, Cluster], number: int, args: argparse.Namespace) -> dict[str, Sample]:
    names = _order(list(clusters), number)
    urls = {"url": clusters[names[0]].url, "compare": clusters[names[1]].url}
    samples: dict[str, Sample] = {name: {} for name in names}
    for length in PROMPT_LENS:
        shape = {"concurrency": 1, "input_len": length, "output_len": 32 if length == min(PROMPT_LENS) else 4}
        summaries = load(**urls, prompt="ids", rounds=2, num_requests=args.requests, seed=1000 + number, **shape)
        for name, summary in zip(names, summaries, strict=True):
            assert summary.ttft_s is not None and summary.itl_s is not None
            samples[name][f"TTFT p50, {length} tokens, ms"] = 1000 * summary.ttft_s.p50
            if length == min(PROMPT_LENS):
                samples[name]["ITL p50, ms"] = 1000 * summary.itl_s.p50
    busy = {"concurrency": args.clients, "num_requests": 8 * args.clients}
    found = load_records(**urls, prompt="ids", rounds=2, seed=2000 + number, **BUSY, **busy)
    for name, measured in zip(names, found, strict=True):
        samples[name][f"goodput, {args.clients} clients, req/s"] = goodput(
            measured, ttft_s=args.slo_ttft, tpot_s=args.slo_tpot
        )
    return samples


def goodput(measured: Measured, *, ttft_s: float, tpot_s: float) -> float:
    """Requests a second that met both objectives."""
    return sum(_meets(record, ttft_s, tpot_s) for record in measured.records) / measured.duration_s


def _meets(record: RequestRecord, most_ttft_s: float, most_tpot_s: float) -> bool:
    return record.ttft_s is not None and record.ttft_s <= most_ttft_s and (tpot_s(record) or 0.0) <= most_tpot_s


def _fill_pool(cluster: Cluster) -> None:
    """Write every KV page of both workers once."""
    length = max(PROMPT_LENS)
    load(url=cluster.url, num_requests=POOL_TOKENS // length + 2, input_len=length, output_len=2, prompt="ids", seed=1)


def _pin(cluster: Cluster) -> None:
    """Give the prefill engine its core; every other thread of the cluster goes to the other one. New threads inherit it."""
    pids = dict(cluster.pids)
    pin_tree(psutil.Process(pids["up"]), OTHER_CORE)
    for child in family(pids["prefill"])[1:]:
        if SCHEDULER in " ".join(child.cmdline()):
            pin_tree(child, PREFILL_CORE)
            return
    raise RuntimeError("the prefill worker has no scheduler process")


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Keep this process on `core`."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


def _scheduler(trees: Trees, args: argparse.Namespace) -> Iterator[dict[str, Sample]]:
    def sample(figures: list[float]) -> Sample:
        p50, least = figures
        return {"scheduler step of 256, p50 us": p50, "scheduler step of 256, least us": least}

    return _programs(trees, args.rounds, SCHEDULER_STEP.format(steps=200), sample, desc="scheduler")


def _router(trees: Trees, args: argparse.Namespace) -> Iterator[dict[str, Sample]]:
    def sample(figures: list[float]) -> Sample:
        whole, stream = figures
        return {"router, us/request": whole, "router, us/event": (stream - whole) / EVENTS}

    return _programs(trees, args.rounds, ROUTER_PATH.format(seconds=3), sample, desc="router")


def _programs(
    trees: Trees, rounds: int, program: str, sample: Callable[[list[float]], Sample], *, desc: str
) -> Iterator[dict[str, Sample]]:
    """Run `program`, which prints figures, in each tree on a core of its own."""
    for number in tqdm(range(rounds), unit="round", desc=desc):
        yield {name: sample(_figures(trees[name], program)) for name in _order(list(trees), number)}


def _figures(tree: Path, program: str) -> list[float]:
    argv = [sys.executable, "-c", program]
    done = subprocess.run(
        ["taskset", "-c", str(PREFILL_CORE), *argv] if shutil.which("taskset") else argv,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(line) for line in done.stdout.split()]


def _order(names: list[str], number: int) -> list[str]:
    return names if number % 2 == 0 else names[::-1]


def _commit(tree: Path) -> str:
    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tree), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")


def _rows(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    rows = []
    for metric in samples["old"][0]:
        old, new = ([sample[metric] for sample in samples[name]] for name in ("old", "new"))
        ratios = [b / a for a, b in zip(old, new, strict=True) if a]
        rows.append(
            {
                "metric": metric,
                "old": median(old),
                "new": median(new),
                "ratio": median(new) / median(old) if median(old) else None,
                "ratio_least": min(ratios, default=None),
                "ratio_most": max(ratios, default=None),
                "samples": {"old": old, "new": new},
            }
        )
    return rows


def render(result: dict[str, Any]) -> str:
    """Write the table of a result."""
    commits, rows = result["commits"], []
    for row in result["rows"]:
        ratios = ["-" if row[key] is None else f"{row[key]:.3f}" for key in ("ratio", "ratio_least", "ratio_most")]
        rows.append([row["metric"], f"{row['old']:.2f}", f"{row['new']:.2f}", ratios[0], f"{ratios[1]} to {ratios[2]}"])
    return table(["", commits["old"], commits["new"], "new / old", "in the rounds"], rows)


if __name__ == "__main__":
    main()
