"""How far `tandem plan` is from the truth where n-grams draft: the speed-up of NGRAM on SmolLM2, real and planned.

usage: python -m benchmarks.plan_speculation [--rounds 3] [--batches 1 8] [--kinds edit quote foreign] [--output FILE]

As its user would: step times are fitted to loads of `tandem bench` on a worker without speculation; how often there are drafts, and how
often they are right, is what /metrics of the worker with NGRAM counted at batch 1. The same requests are then planned, prompts cached.
Beside the fitted line (a row costs the same however many there are) stands a plan with the row costs that a worker itself learns
(engine/core/row_costs.py), from decode steps of 1 to 32 requests: what of the error is the line's.
"""

import argparse
import asyncio
import json
import re
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from tqdm import tqdm

from benchmarks.cluster import tandem_up
from benchmarks.cpu_use import cpu_use
from benchmarks.speculation import answer, bodies, measure
from deploy.bench import environment
from deploy.bench.config import BenchConfig
from deploy.bench.report import table
from deploy.bench.run import measure as bench
from deploy.bench.stats import RequestRecord
from engine.core.row_costs import RowCosts
from engine.model_files.source import smollm2_file
from planner.config import PlanConfig
from planner.fit import fit, quiet_stretches
from planner.layout import parse_layout
from planner.profile import Profile, describe
from planner.step_time import StepLoad, StepTime
from planner.study import Study, planned_cluster, study_of
from planner.workload import FIRST_OWN, PlannedRequest

ALONE = {"concurrency": 1, "num_requests": 20, "input_len": 1024, "random_range_ratio": 0.05, "output_len": 16}
TOGETHER = {"input_len": 384, "random_range_ratio": 0.2, "output_len": 48}
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
LAYOUT = parse_layout("1U")
FLAGS = (
    "--unified",
    "--model-path",
    "smollm2",
    "--num-threads",
    "1",
    "--max-step-time",
    "0",
    "--no-enable-mixed-chunk",
)


@dataclass(frozen=True)
class ByRows:
    """`fitted`, where a decode step's rows cost what RowCosts has learned."""

    fitted: StepTime
    costs: RowCosts

    def seconds(self, load: StepLoad) -> float:
        if load.prefill_tokens or not load.decodes:
            return self.fitted.seconds(load)
        context = replace(load, decode_context=0)
        return self.costs.step(load.decodes) + self.fitted.seconds(load) - self.fitted.seconds(context)


def fitted(url: str) -> tuple[Profile, StepTime, float]:
    """Return the profile, step times by rows, and the cores that others left meanwhile."""
    with cpu_use() as used:
        alone = _records(url, **ALONE)
        together = [_records(url, **TOGETHER, concurrency=n, num_requests=2 * n) for n in CONCURRENCIES]
    found = fit([alone, together[CONCURRENCIES.index(8)]])
    costs = RowCosts()
    for records in together:
        for stretch in quiet_stretches(records):
            of_context = found.step_time.decode_context_s * stretch.context
            costs.note(max(1, round(stretch.requests)), max(1e-9, stretch.seconds - of_context))
    profile = Profile(step_time=found.step_time, outside_s=found.outside_s, source=describe(found))
    return profile, ByRows(found.step_time, costs), used.cores_left


def _records(url: str, **load: Any) -> list[RequestRecord]:
    config = BenchConfig(url=url, prompt="ids", disable_progress=True, **load)
    (measured,) = asyncio.run(bench(config))
    return list(measured.records)


def planned_rate(study: Study, requests: list[PlannedRequest], step_time: StepTime | None) -> tuple[float, float]:
    """Return (output tokens a second, tokens a step) of requests sent at once, whose prompts are cached."""
    if step_time is not None:
        study = replace(study, hardware=msgspec.structs.replace(study.hardware, step_times={1: step_time}))
    cluster = planned_cluster(study, LAYOUT)
    cluster.warm(requests)
    records = cluster.run(requests, rate=1e9, until_s=float("inf"))
    tokens = sum(record.output_tokens for record in records)
    return tokens / max(record.sent_s + record.e2e_s for record in records), cluster.step_tokens or 1.0


def counted(url: str) -> dict[str, float]:
    """Totals of the worker's /metrics by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = re.findall(r"^(\S+?)_total(?:\{.*?\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def rates_of(url: str, asked: list[dict[str, Any]]) -> dict[str, float]:
    """--speculative-accept-rate and --speculative-match-rate, as docs/planning.md says, of `asked`, one after the other."""
    before = counted(url)
    for body in asked:
        answer(url, body)
    now = {name: value - before[name] for name, value in counted(url).items() if name in before}
    accepted, wrong = now["vllm:spec_decode_num_accepted_tokens"], now["tandem_num_wrong_drafts"]
    matched = now["vllm:spec_decode_num_drafts"] / (now["vllm:generation_tokens"] - len(asked) - accepted)
    return {
        "speculative_accept_rate": min(0.999, max(0.001, accepted / max(1, accepted + wrong))),
        "speculative_match_rate": min(1.0, max(0.001, matched)),
    }


def compare(
    off: str, on: str, kind: str, batch: int, args: argparse.Namespace, profile: Path, by_rows: StepTime
) -> dict[str, Any]:
    asked = bodies(kind, batch, tokens=args.tokens)
    measure(on, asked)  # so that prompts are cached
    chances = rates_of(on, asked)
    rates: dict[str, list[float]] = {off: [], on: []}
    infos: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds + 1):
        for url in (off, on) if number % 2 else (on, off):
            rate, answers = measure(url, asked)
            rates[url] += [rate] if number else []
            infos[url] = [a["meta_info"] for a in answers]
    real = {"off": median(rates[off]), "on": median(rates[on])}
    length = sum(i.get("spec_accept_length", 1.0) for i in infos[on]) / batch
    requests = [
        PlannedRequest(at=0.0, blocks=((FIRST_OWN + n, i["prompt_tokens"]),), output_len=i["completion_tokens"])
        for n, i in enumerate(infos[on])
    ]
    config = PlanConfig(
        model_path=str(smollm2_file()),
        gpu_profile=str(profile),
        transfer_gb_s=1.0,
        max_total_tokens=65536,
        page_size=16,
        chunked_prefill_size=1024,
        disable_overlap_schedule=True,  # an inline stream has nothing to overlap
    )
    speculating = replace(config, speculative_algorithm="NGRAM", **chances)
    row: dict[str, Any] = {"kind": kind, "batch": batch, "real": real, "step_tokens": length, **chances}
    for name, step_time in (("line", None), ("rows", by_rows)):
        plain, _ = planned_rate(study_of(config), requests, step_time)
        fast, step_tokens = planned_rate(study_of(speculating), requests, step_time)
        row[name] = {"off": plain, "on": fast, "step_tokens": step_tokens}
    return row


def render(rows: list[dict[str, Any]]) -> str:
    def ratio(found: dict[str, float]) -> float:
        return found["on"] / found["off"]

    shown = []
    for row in rows:
        cells = [
            row["kind"],
            str(row["batch"]),
            f"{row['real']['on']:.0f}",
            f"{row['step_tokens']:.2f}",
            f"{ratio(row['real']):.2f}",
        ]
        for name in ("line", "rows"):
            error = 100 * (row[name]["on"] / row["real"]["on"] - 1)
            cells += [f"{row[name]['step_tokens']:.2f}", f"{ratio(row[name]):.2f}", f"{error:+.0f} %"]
        shown.append(cells)
    header = [
        "answers",
        "batch",
        "matched",
        "right",
        "real: tokens/s",
        "a step",
        "speed-up",
        "planned: a step",
        "speed-up",
        "tokens/s",
        "by rows: a step",
        "speed-up",
        "tokens/s",
    ]
    return table(header, shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=["edit", "quote", "foreign"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-plan-")))
        off = stack.enter_context(tandem_up(*FLAGS)).url
        profile, by_rows, cores = fitted(off)
        (folder / "profile.json").write_bytes(msgspec.json.encode(profile))
        on = stack.enter_context(tandem_up(*FLAGS, "--speculative-algorithm", "NGRAM")).url
        cells = [(kind, batch) for kind in args.kinds for batch in args.batches]
        with cpu_use() as used:
            rows = [
                compare(off, on, kind, batch, args, folder / "profile.json", by_rows)
                for kind, batch in tqdm(cells, unit="cell", disable=None)
            ]
    print(f"{profile.source}; cores left by others: fit {cores:.2f}, then {used.cores_left:.2f}\n\n{render(rows)}")
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment.describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
