"""The sum of ranks beside gloo's, by real processes of one machine."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from deploy.bench.report import table
from engine.kernels.tape import Tape, Workspace
from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from service.process.start import die_with_parent

TITLE = "Sums"
TEXT = (
    "A sum of all ranks' partial results, as each layer of a model needs two of: float32 in, the same on every rank out. Ours adds in"
    " one tree and rounds to bf16 (engine/kernels/allreduce.c); `tape`: as a decode step repeats it, without Python. gloo adds"
    " float32 in place by torch.distributed. In turns within one run, by the same processes, of one thread each. The time is that of"
    " rank 0; CPU time is that of rank 0's process, for one sum. The aim: a tenth of gloo's p50 at 4 KB with two ranks."
)

RANKS = (2, 4)
SIZES = (4 << 10, 64 << 10, 1 << 20)
TAPED = 16  # sums on a tape
TIMES = {"ours": 400, "tape": 50, "gloo": 60}  # of a round
LARGE_TIMES = {"ours": 60, "tape": 8, "gloo": 20}  # from `LARGE_BYTES`
LARGE_BYTES = 1 << 20
WARM_UP = 5
START_S = 120.0

Seconds = list[float]


def measure(*, rounds: int) -> list[dict[str, Any]]:
    """One row a (number of ranks, size)."""
    return [row for ranks in RANKS for row in _run(ranks, rounds)]


def render(rows: list[dict[str, Any]]) -> str:
    header = ["ranks, bytes of a partial", "ours p50, us", "p99", "from a tape", "gloo p50, us", "p99", "gloo / ours"]
    header += ["gloo / tape", "CPU us: ours", "gloo"]
    return table(
        header,
        [
            [
                f"{row['ranks']}, {row['bytes'] >> 10} KB",
                f"{row['ours_p50_us']:.1f}",
                f"{row['ours_p99_us']:.0f}",
                f"{row['tape_p50_us']:.1f}",
                f"{row['gloo_p50_us']:.0f}",
                f"{row['gloo_p99_us']:.0f}",
                f"{row['gloo_p50_us'] / row['ours_p50_us']:.0f}",
                f"{row['gloo_p50_us'] / row['tape_p50_us']:.0f}",
                f"{row['ours_cpu_us']:.1f}",
                f"{row['gloo_cpu_us']:.0f}",
            ]
            for row in rows
        ],
    )


def _run(ranks: int, rounds: int) -> list[dict[str, Any]]:
    plan = RegionPlan(ranks=ranks)
    with ExitStack() as stack:
        region = stack.enter_context(closing(SharedRegion.create(plan)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-ranks-"))
        assert region.descriptor is not None
        command = [sys.executable, "-m", __name__, "--descriptor", str(region.descriptor), "--store", f"{folder}/store"]
        command += ["--plan", msgspec.json.encode(plan).decode(), "--rounds", str(rounds)]
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    pass_fds=[region.descriptor],
                    preexec_fn=die_with_parent(),
                )
            )
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), [process.returncode for process in started]
    return list(json.loads(said[0]))


def _rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank's process does; all do it in the same order."""
    torch.set_num_threads(1)
    plan = msgspec.json.decode(args.plan, type=RegionPlan)
    store = dist.FileStore(args.store, plan.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=args.rank, world_size=plan.ranks, timeout=timedelta(seconds=START_S)
    )
    ours = SharedMemoryCollectives(SharedRegion.open(args.descriptor, plan), rank=args.rank)
    rows = [_size(ours, size, args.rounds) for size in SIZES]
    dist.destroy_process_group()
    return rows


def _size(ours: SharedMemoryCollectives, size: int, rounds: int) -> dict[str, Any]:
    partial, in_place, tape = torch.randn(1, size // 4), torch.zeros(size // 4), Tape(Workspace(1))
    with tape.recording():
        for _ in range(TAPED):
            ours.sum(partial, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.sum(partial, dtype=torch.bfloat16),
        "tape": tape.play,
        "gloo": lambda: dist.all_reduce(in_place),
    }
    taken_s: dict[str, Seconds] = {name: [] for name in ways}
    cpu_s = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for name, way in ways.items():
            for _ in range(WARM_UP):
                way()
            before_s = time.process_time()
            taken_s[name] += _timed(way, (LARGE_TIMES if size >= LARGE_BYTES else TIMES)[name])
            cpu_s[name] += time.process_time() - before_s
    row: dict[str, Any] = {"ranks": ours.size, "bytes": size}
    for name, seconds in taken_s.items():
        each = TAPED if name == "tape" else 1
        row[f"{name}_p50_us"] = median(seconds) / each * 1e6
        row[f"{name}_p99_us"] = sorted(seconds)[int(len(seconds) * 0.99)] / each * 1e6
        row[f"{name}_cpu_us"] = cpu_s[name] / len(seconds) / each * 1e6
    return row


def _timed(way: Callable[[], Any], times: int) -> Seconds:
    taken_s = []
    for _ in range(times):
        before_s = time.perf_counter()
        way()
        taken_s.append(time.perf_counter() - before_s)
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of benchmarks.ranks' sums")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    print(json.dumps(_rank(parser.parse_args())))


if __name__ == "__main__":
    main()
