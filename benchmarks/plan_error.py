"""How far `tandem plan` is from the truth: the same requests on real CPU workers and under virtual time.

usage: python -m benchmarks.plan_error [--layers 12] [--requests 60] [--rate 1.5] [--rounds 3] [--report docs/reports/plan_error.json]

A random checkpoint (benchmarks/random_model.py) is measured as a user would: by requests one after another, on a unified worker
and on a pair, and by eight at once on the unified one. Step times and the hand-over are fitted from these alone. Then Poisson
arrivals are replayed on both, and planned for the same. Workers share this machine's cores with router, HTTP
and the load's client (`--host-cores`, their CPU time a token as they took it under the eight) and with other people, whose mean
share during the replay is taken off the planner's cores and stated. Where they left less than a core while steps were measured,
those are longer by that, and the planner's cores are as much faster. Of several rounds that one counts in which others took the
least, whatever the plan then says. The report is written anew after each round.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import tandem_up
from benchmarks.cpu_use import cpu_use
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.config import BenchConfig
from deploy.bench.run import measure
from deploy.bench.stats import RequestRecord, Summary, summarize, table
from planner.cluster import ClusterLayout, parse_layout
from planner.config import PlanConfig
from planner.fit import HandoverTime, Profile, StepTimeFit, describe, fit, fit_handover
from planner.study import planned_cluster, study_of

LAYOUTS = ("1U", "1P1D")
ALONE = {"concurrency": 1, "num_requests": 20, "input_len": 1024, "random_range_ratio": 0.05, "output_len": 16}
TOGETHER = {"concurrency": 8, "num_requests": 24, "input_len": 384, "random_range_ratio": 0.2, "output_len": 64}
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
INPUT_TOKENS, OUTPUT_TOKENS = (64, 768), (8, 64)


@dataclass(frozen=True, kw_only=True)
class Round:
    """`real`, `cores`: by layout; cores that others left to us, during the fit's loads and each replay. `beside_s`: CPU beside

    schedulers, a token.
    """

    found: StepTimeFit
    handover: HandoverTime
    beside_s: float
    real: dict[str, Summary]
    cores: dict[str, float]


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the clusters
    with tempfile.TemporaryDirectory(prefix="tandem-plan-") as name:
        folder = Path(name)
        write_model(folder / "model", layers=args.layers)
        (folder / "trace.jsonl").write_text(_trace(args.requests, args.rate))
        rounds = []
        model = str(folder / "model")
        flags = ("--model-path", model, "--max-step-time", "0")  # a plan's steps have no limit in time
        # the plan's 1U computes prompts first
        with tandem_up(*flags, "--unified", "--no-enable-mixed-chunk") as unified, tandem_up(*flags) as pair:
            for seed in range(args.rounds):
                rounds.append(_round({"1U": unified.url, "1P1D": pair.url}, folder / "trace.jsonl", seed))
                best = max(rounds, key=lambda one: min(one.cores.values()))
                report = _compare(best, folder, args)
                print(render(report) + "\n", flush=True)
                if args.report:
                    args.report.write_text(json.dumps(report, indent=1) + "\n")
                    args.report.with_suffix(".md").write_text(page(report))


def page(report: dict[str, Any]) -> str:
    """Write the text of docs/reports/plan_error.md."""
    env = report["environment"]
    return f"""# The planner's error

`make plan-error` writes this page: the same requests on real workers and in `tandem plan`
([planning.md](../planning.md#how-wrong-it-is)). Do not edit it by hand.

{render(report)}

Run at commit {env["commit"]}, {env["time"]}; {env["cpu"]}, {env["cores"]} cores.
"""


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
    cores = ", ".join(f"{name} {cores:.2f}" for name, cores in report["cores_left"].items())
    head = f"{report['fit']}; cores left by others: {cores}; {1000 * report['host_token_s']:.2f} ms of CPU a token beside steps"
    return head + "\n\n" + table(["layout", "", "real, ms", "planned, ms", "error"], rows)


def _compare(one: Round, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    profile = folder / "profile.json"
    measured = Profile(step_time=one.found.step_time, outside_s=one.found.outside_s, handover=one.handover)
    profile.write_bytes(msgspec.json.encode(measured))
    config = PlanConfig(
        model_path=str(folder / "model"),
        gpu_profile=str(profile),
        trace=str(folder / "trace.jsonl"),
        num_requests=args.requests,
        max_total_tokens=65536,
        page_size=16,
        chunked_prefill_size=2048,
        max_running_requests=64,
        disable_overlap_schedule=True,  # an inline stream has nothing to overlap
        host_token_time_s=one.beside_s,
    )
    stretch = max(1.0, 1 / one.cores["fit"])
    planned = {name: _plan(replace(config, host_cores=stretch * one.cores[name]), name, args.rate) for name in LAYOUTS}
    return {
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "arguments": {name: value for name, value in vars(args).items() if name != "report"},
        "fit": describe(one.found, one.handover),
        "step_time": asdict(one.found.step_time),
        "outside_s": one.found.outside_s,
        "handover": asdict(one.handover),
        "host_token_s": one.beside_s,
        "cores_left": one.cores,
        "layouts": {
            name: {"real": msgspec.to_builtins(one.real[name]), "planned": msgspec.to_builtins(planned[name])}
            for name in LAYOUTS
        },
    }


def _round(urls: dict[str, str], trace: Path, seed: int) -> Round:
    in_turns = {"compare": urls["1P1D"], "rounds": ALONE["num_requests"]}
    with cpu_use() as eight:
        (measured,) = _bench(urls["1P1D"], **TOGETHER, seed=seed)
    with cpu_use() as fitted:
        alone, handed_over = _bench(urls["1U"], **ALONE, **in_turns, seed=seed)
        found = fit([alone, *_bench(urls["1U"], **TOGETHER, seed=seed)])
    real, cores = {}, {"fit": fitted.cores_left}
    for name, url in urls.items():
        with cpu_use() as used:
            (records,) = _bench(url, trace=str(trace), num_requests=10_000, seed=seed)
        real[name], cores[name] = summarize(records, duration_s=1.0), used.cores_left
    return Round(
        found=found,
        handover=fit_handover(alone, handed_over),
        beside_s=eight.beside_s / sum(record.output_tokens for record in measured),
        real=real,
        cores=cores,
    )


def _bench(url: str, **load: Any) -> list[Sequence[RequestRecord]]:
    """The records of each target."""
    config = BenchConfig(url=url, prompt="ids", disable_progress=True, **load)
    targets = [measured.records for measured in asyncio.run(measure(config))]
    if failed := [record.error for records in targets for record in records if record.error]:
        raise RuntimeError(f"requests failed: {failed}")
    return targets


def _plan(config: PlanConfig, name: str, rate: float) -> Summary:
    layout: ClusterLayout = parse_layout(name)
    study = replace(study_of(config), history=())
    records = planned_cluster(study, layout).run(study.requests, rate=rate, until_s=float("inf"))
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
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second, of the whole cluster")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
