"""How far `tandem plan` is from the truth: the same requests on real CPU workers and under virtual time.

usage: python -m benchmarks.plan_error [--layers 2] [--requests 24] [--rate 1.5] [--rounds 4] [--report docs/reports/plan_error.json]

A random checkpoint (benchmarks/random_model.py) is measured by two loads on a unified worker: requests one after another,
and eight at once. The cost model is fitted from these alone. A trace of Poisson arrivals is replayed on real clusters, unified
and 1P1D, and planned for the same. A plan's workers have a device each and nobody beside them; this machine may be shared. So
of several rounds that one counts in which the measured steps agreed best with each other, whatever the plan then says.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import tandem_up
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.config import BenchConfig
from deploy.bench.report import table
from deploy.bench.run import measure
from deploy.bench.stats import Record, Summary, summarize
from deploy.plan.cluster import PlannedCluster
from deploy.plan.config import PlanConfig
from deploy.plan.fit import Fit, fit
from deploy.plan.hardware import Profile, describe
from deploy.plan.layout import Layout, parse_layout
from deploy.plan.study import cluster_spec, study_of

LAYOUTS = ("1U", "1P1D")
ALONE = {"concurrency": 1, "num_requests": 16, "input_len": 1024, "random_range_ratio": 0.05, "output_len": 16}
TOGETHER = {"concurrency": 8, "num_requests": 16, "input_len": 384, "random_range_ratio": 0.2, "output_len": 64}
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
INPUT_TOKENS, OUTPUT_TOKENS = (64, 768), (8, 64)
TRANSFER_GB_S = 1.0


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="tandem-plan-") as name:
        folder = Path(name)
        write_model(folder / "model", layers=args.layers)
        trace = folder / "trace.jsonl"
        trace.write_text(_trace(args.requests, args.rate))
        report = {
            "environment": environment.describe(),
            "load_average": os.getloadavg(),
            "rate": args.rate,
            **_compare(folder, trace, args),
        }
    print(render(report))
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")


def render(report: dict[str, Any]) -> str:
    """The table of a report."""
    rows = []
    for layout, found in report["layouts"].items():
        for latency in LATENCIES:
            for part in ("p50", "p90"):
                real, planned = (1000 * found[side][latency][part] for side in ("real", "planned"))
                error = 100 * (planned / real - 1)
                name = latency.removesuffix("_s").upper()
                rows.append([layout, f"{name} {part}", f"{real:.0f}", f"{planned:.0f}", f"{error:+.0f} %"])
    return report["fit"] + "\n\n" + table(["layout", "", "real, ms", "planned, ms", "error"], rows)


def _compare(folder: Path, trace: Path, args: argparse.Namespace) -> dict[str, Any]:
    model = str(folder / "model")
    with tandem_up("--model-path", model, "--unified") as unified, tandem_up("--model-path", model) as pair:
        rounds = [_round(unified.url, pair.url, trace, seed) for seed in range(args.rounds)]
    found, real = min(rounds, key=lambda one: one[0].decode_error)
    profile = folder / "profile.json"
    profile.write_bytes(msgspec.json.encode(Profile(step_time=found.step_time, outside_s=found.outside_s)))
    config = PlanConfig(
        model_path=model,
        profile=str(profile),
        trace=str(trace),
        num_requests=args.requests,
        max_total_tokens=65536,
        transfer_gb_s=TRANSFER_GB_S,
        page_size=16,
        chunked_prefill_size=2048,
        max_running_requests=64,
        disable_overlap_schedule=True,  # an inline stream has nothing to overlap
    )
    layouts = {
        name: {"real": msgspec.to_builtins(real[name]), "planned": msgspec.to_builtins(_plan(config, name, args.rate))}
        for name in LAYOUTS
    }
    return {
        "fit": describe(found),
        "step_time": asdict(found.step_time),
        "outside_s": found.outside_s,
        "layouts": layouts,
    }


def _round(unified: str, pair: str, trace: Path, seed: int) -> tuple[Fit, dict[str, Summary]]:
    measured = [_bench(unified, **load, seed=seed) for load in (ALONE, TOGETHER)]
    urls = {"1U": unified, "1P1D": pair}
    replayed = {name: _bench(url, trace=str(trace), num_requests=10_000, seed=seed) for name, url in urls.items()}
    return fit(measured), {name: summarize(records, duration_s=1.0) for name, records in replayed.items()}


def _bench(url: str, **load: Any) -> Sequence[Record]:
    async def run() -> Sequence[Record]:
        async with AsyncExitStack() as stack:
            config = BenchConfig(url=url, prompt="ids", **load)
            (measured,) = await measure(config, stack)
            return measured.records

    records = asyncio.run(run())
    if failed := [record.error for record in records if record.error]:
        raise RuntimeError(f"requests failed: {failed}")
    return records


def _plan(config: PlanConfig, name: str, rate: float) -> Summary:
    layout: Layout = parse_layout(name)
    study = replace(study_of(config), history=())
    records = PlannedCluster(cluster_spec(study, layout)).run(study.requests, rate=rate, until_s=float("inf"))
    return summarize(records, duration_s=1.0)


def _trace(count: int, rate: float) -> str:
    """Arrivals of mean gap exactly 1/rate seconds; no two prompts share a prefix."""
    rng = random.Random(7)
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + rng.expovariate(1.0))
    stretch = (count - 1) / (times[-1] * rate)
    lines = []
    for number, time in enumerate(times):
        entry = {"timestamp": 1000 * stretch * time, "input_length": rng.randint(*INPUT_TOKENS)}
        hashes = [2 * number, 2 * number + 1]
        lines.append(json.dumps(entry | {"output_length": rng.randint(*OUTPUT_TOKENS), "hash_ids": hashes}))
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second, of the whole cluster")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
