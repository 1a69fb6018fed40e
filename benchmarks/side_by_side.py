"""Compares two source trees in one run, in turns: what a change of the code costs or gains (`python -m benchmarks.report --beside TREE`).

Both trees use the libraries of this interpreter. Each round measures one tree and then the other, and the next round goes the other way, so
what drifts on the machine (heat, neighbours) falls on both alike.

    TTFT, ITL      p50 of one request in flight through a PD cluster of each tree
    goodput        requests a second within `TTFT_S` and `TPOT_S`, four at once
    scheduler      CPU time of a decode step of 256 requests, the pure core alone (scheduler_step.py of each tree)
    router         CPU time of a request, and of an event of a stream (router_path.py of each tree), the least of many windows

Both clusters are up at the same time. The engine of each prefill worker has a core for itself, everything else shares the
other one: decode, HTTP, routers and this client. The pools are full before anything is measured, so no request gets memory
that was never touched. A figure is the median over the rounds; the spread is that of the rounds' own ratios.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil

from benchmarks.cluster import Cluster, load, load_records, pin_tree, tandem_up
from benchmarks.cpu_use import SCHEDULER
from benchmarks.measures import Row, rendered, tell
from deploy.bench import environment
from deploy.bench.load import Measured
from deploy.bench.stats import tpot_s
from tools.family import family

PREFILL_CORE, OTHER_CORE = 0, 1
PROMPT_LENS = (64, 512, 2048)
POOL_TOKENS = 16384
BUSY = {"input_len": 256, "output_len": 32, "concurrency": 4, "num_requests": 32}
REQUESTS = 6  # of each prompt length, for each tree, in a round
TTFT_S, TPOT_S = 1.0, 0.05
EVENTS = 64  # of a stream in router_path.py

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


def compare(old: Path, new: Path, *, rounds: int, output: Path) -> None:
    """Measure both checkouts and print the table; all figures go to `output`."""
    trees: Trees = {"old": old, "new": new}
    samples: dict[str, list[Sample]] = {"old": [], "new": []}
    for collect in (_clusters, _scheduler, _router):
        for number, found in enumerate(collect(trees, rounds)):
            for name, sample in found.items():
                samples[name] += [{}] * (number + 1 - len(samples[name]))
                samples[name][number] = samples[name][number] | sample
                tell(name, round=number, **sample)
    commits = {name: environment.commit(tree) for name, tree in trees.items()}
    rows = _rows(samples)
    result = {"environment": environment.describe(), "commits": commits, "rows": rows, "samples": samples}
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(rendered({f"old: {commits['old']}, new: {commits['new']}, {rounds} rounds": rows}))


def _clusters(trees: Trees, rounds: int) -> Iterator[dict[str, Sample]]:
    flags = ("--num-threads", "1", "--max-total-tokens", str(POOL_TOKENS))
    with (
        tandem_up(*flags, tree=trees["old"]) as old,
        tandem_up(*flags, tree=trees["new"]) as new,
        _on_core(OTHER_CORE),
    ):
        clusters = {"old": old, "new": new}
        for cluster in clusters.values():
            _pin(cluster)
            _fill_pool(cluster)
        for number in range(rounds):
            yield _cluster_round(clusters, number)


def _cluster_round(clusters: dict[str, Cluster], number: int) -> dict[str, Sample]:
    names = _order(list(clusters), number)
    urls = {"url": clusters[names[0]].url, "compare": clusters[names[1]].url}
    samples: dict[str, Sample] = {name: {} for name in names}
    for length in PROMPT_LENS:
        shape = {"concurrency": 1, "input_len": length, "output_len": 32 if length == min(PROMPT_LENS) else 4}
        summaries = load(**urls, prompt="ids", rounds=2, num_requests=REQUESTS, seed=1000 + number, **shape)
        for name, summary in zip(names, summaries, strict=True):
            assert summary.ttft_s is not None
            samples[name][f"TTFT p50, {length} tokens, ms"] = 1000 * summary.ttft_s.p50
            if length == min(PROMPT_LENS):  # four tokens of a longer one may come in one event
                assert summary.itl_s is not None
                samples[name]["ITL p50, ms"] = 1000 * summary.itl_s.p50
    found = load_records(**urls, prompt="ids", rounds=2, seed=2000 + number, **BUSY)
    for name, measured in zip(names, found, strict=True):
        samples[name][f"goodput, {BUSY['concurrency']} clients, req/s"] = goodput(measured)
    return samples


def goodput(measured: Measured) -> float:
    """Return the requests a second that met both objectives."""
    in_time = (record for record in measured.records if record.ttft_s is not None and record.ttft_s <= TTFT_S)
    return sum((tpot_s(record) or 0.0) <= TPOT_S for record in in_time) / measured.duration_s


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


def _scheduler(trees: Trees, rounds: int) -> Iterator[dict[str, Sample]]:
    def sample(figures: list[float]) -> Sample:
        p50, least = figures
        return {"scheduler step of 256, p50 us": p50, "scheduler step of 256, least us": least}

    return _programs(trees, rounds, SCHEDULER_STEP.format(steps=200), sample)


def _router(trees: Trees, rounds: int) -> Iterator[dict[str, Sample]]:
    def sample(figures: list[float]) -> Sample:
        whole, stream = figures
        return {"router, us/request": whole, "router, us/event": (stream - whole) / EVENTS}

    return _programs(trees, rounds, ROUTER_PATH.format(seconds=3), sample)


def _programs(
    trees: Trees, rounds: int, program: str, sample: Callable[[list[float]], Sample]
) -> Iterator[dict[str, Sample]]:
    """Run `program`, which prints figures, in each tree on a core of its own."""
    for number in range(rounds):
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


def _rows(samples: dict[str, list[Sample]]) -> list[Row]:
    rows: list[Row] = []
    for metric in samples["old"][0]:
        old, new = ([sample[metric] for sample in samples[name]] for name in ("old", "new"))
        ratios = sorted(b / a for a, b in zip(old, new, strict=True) if a)
        row: Row = {"": metric, "old": f"{median(old):.2f}", "new": f"{median(new):.2f}"}
        if ratios:
            row |= {
                "new / old": f"{median(new) / median(old):.3f}",
                "in the rounds": f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
            }
        rows.append(row)
    return rows
