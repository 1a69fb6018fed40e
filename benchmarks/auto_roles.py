"""Goodput with fixed roles and with `--auto-roles`: the same requests through planned clusters, every split and every start.

usage: python -m benchmarks.auto_roles [--trace PATH[:RATE]]... [--workers 4 8] [--report docs/reports/auto_roles]

Clusters are those of `tandem plan` (docs/planning.md): real scheduler, roles and, where roles move, the router's real gauge and
controller. A trace is replayed on H100s by data sheet, in its own rhythm, at RATE requests a second and worker. Beside traces
stands a workload whose needs turn over, prompts by day and answers by night, on slow workers (`SLOW`): few requests then say
as much. A switched worker ends what it has, and is away for `--switch-s`.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from benchmarks.role_moves import AutoSpec, RoleMoves, WorkloadPhase, from_phases
from deploy.bench.environment import describe
from deploy.bench.trace import read_trace
from planner.config import PlanConfig
from planner.goodput import SloTargets, judged
from planner.layout import ClusterLayout, parse_layout
from planner.step_time import Fitted
from planner.study import Study, planned_cluster, run_study, study_of
from planner.workload import Lengths, from_trace
from router.config import AutoRolesFlags

SLO_TTFT_MS, SLO_TPOT_MS = 10_000.0, 30.0
# A prompt of 800 tokens takes 0.4 s; a step of 16 answers 0.1 s. By day prefill needs 2 of 4 workers and a little more, by night decode 3.
SLOW = Fitted(
    prefill_step_s=0.002,
    prefill_token_s=0.0005,
    prefill_pair_s=0.0,
    decode_step_s=0.02,
    decode_request_s=0.005,
    decode_context_s=0.0,
)
SLOW_SLO = SloTargets(ttft_s=4.0, tpot_s=0.1, itl_s=None, share=0.9)
DAY = Lengths(input_len=800, output_len=4, range_ratio=0.5)
NIGHT = Lengths(input_len=64, output_len=40, range_ratio=0.5)
DAYS = 1
PHASE_S = 240.0
DAY_RATE, NIGHT_RATE = 1.7, 3.3  # requests a second and worker
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`rate`: requests a second and worker."""

    name: str
    study: Study
    rate: float


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    report: dict[str, Any] = {
        "environment": describe(),
        "switch_s": args.switch_s,
        "runs": [],
    }
    jobs = [(load, start, auto) for n in args.workers for load in _loads(args, n) for start, auto in _tries(n)]
    for load, start, auto in tqdm(jobs, unit="run"):
        report["runs"].append(run(load, start, auto_spec(load.study.slo, args.switch_s) if auto else None))
        if args.report:
            args.report.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(render(report["runs"]))
    if args.report:
        args.report.with_suffix(".md").write_text(page(report, args.report.name))
        plot(report["runs"], args.report.with_suffix(".png"))
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_roles", description=__doc__)
    parser.add_argument("--trace", action="append", default=[], help="PATH:RATE, JSON lines, may be gzipped")
    parser.add_argument("--num-requests", type=int, default=4000, help="of a trace, from its middle")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8], help="sizes of the cluster")
    parser.add_argument("--switch-s", type=float, default=20.0, help="how long a drained worker is away")
    parser.add_argument("--report", type=Path, help="write this name with .json, .md and .png (needs matplotlib)")
    return parser.parse_args(argv)


def _loads(args: argparse.Namespace, num_workers: int) -> Iterator[Load]:
    yield day_and_night(num_workers)
    for text in args.trace:
        path, _, rate = text.rpartition(":")
        study = _of_trace(path, args.num_requests)
        yield Load(name=Path(path).name.partition("_")[0], study=study, rate=float(rate))


def day_and_night(num_workers: int) -> Load:
    """Phases of `PHASE_S`, whatever the size of the cluster. Rates are those of the day; nights have their own gap."""
    total = DAY_RATE * num_workers
    day = WorkloadPhase(lengths=DAY, count=round(PHASE_S * total))
    night = WorkloadPhase(lengths=NIGHT, count=round(PHASE_S * NIGHT_RATE * num_workers), gap=DAY_RATE / NIGHT_RATE)
    study = _study()
    hardware = msgspec.structs.replace(study.hardware, step_times={1: SLOW})
    requests = from_phases([day, night] * DAYS, seed=SEED)
    study = replace(study, hardware=hardware, slo=SLOW_SLO, requests=requests, history=[])
    return Load(name="day and night", study=study, rate=DAY_RATE)


def _of_trace(path: str, num_requests: int) -> Study:
    """Without the few requests that are longer than the model's context."""
    study = _study()
    longest = study.engine.context_length or 0
    entries = [e for e in read_trace(path) if e.input_length + e.output_length <= longest]
    history, requests = from_trace(entries, count=num_requests)
    return replace(study, history=history, requests=requests)


def _study() -> Study:
    return study_of(
        PlanConfig(
            model_path="docs/planning",
            gpu="H100",
            slo_ttft_s=SLO_TTFT_MS / 1000,
            slo_tpot_s=SLO_TPOT_MS / 1000,
            slo_itl_s=SLO_TPOT_MS / 1000,
        )
    )


def auto_spec(slo: SloTargets, switch_s: float) -> AutoSpec:
    """The router's defaults, with the objectives of the requests: half of TTFT's may be spent waiting."""
    flags = AutoRolesFlags(auto_roles_ttft_s=slo.ttft_s / 2, auto_roles_itl_s=slo.tpot_s)
    return AutoSpec(flags=flags, switch_s=switch_s)


def _tries(num_workers: int) -> list[tuple[ClusterLayout, bool]]:
    """Every split as it is, and every one (of eight workers three) as a start."""
    splits = [parse_layout(f"{p}P{num_workers - p}D") for p in reversed(range(1, num_workers))]
    starts = splits if num_workers <= 4 else [splits[0], splits[num_workers // 2 - 1], splits[-1]]
    return [(layout, False) for layout in splits] + [(layout, True) for layout in starts]


def run(load: Load, start: ClusterLayout, auto: AutoSpec | None) -> dict[str, Any]:
    """One cluster over one load. `goodput`: good requests a second and worker."""
    began_s = time.perf_counter()
    cluster = planned_cluster(load.study, start)
    moves = RoleMoves(spec=auto, cluster=cluster).done if auto else []
    records = run_study(load.study, cluster, load.rate * start.num_gpus)
    seen = judged(records)
    good = sum(load.study.slo.is_met_by(record) for record in seen)
    span_s = seen[-1].sent_s - seen[0].sent_s
    return {
        "load": load.name,
        "workers": start.num_workers,
        "start": start.name,
        "auto": auto is not None,
        "slo": asdict(load.study.slo),
        "requests": len(records),
        "seconds": span_s,
        "good_share": good / len(seen),
        "goodput": good / span_s / start.num_workers,
        "moves": [{"to": m.to_role.value, "at_s": m.began_s, "took_s": m.ended_s - m.began_s} for m in moves],
        "ends_as": _ends_as(cluster.pools()),
        "computed_in_s": time.perf_counter() - began_s,
    }


def _ends_as(pools: dict[str, list[Any]]) -> str:
    return f"{len(pools['prefill'])}P{len(pools['decode'])}D"


def page(report: dict[str, Any], name: str) -> str:
    """Write the text of docs/reports/auto_roles.md."""
    env = report["environment"]
    return f"""# Auto roles

`python -m benchmarks.auto_roles` writes this page. Do not edit it by hand. What the figures mean:
[router.md](../router.md#auto-roles). A switched worker is away for {report["switch_s"]:g} s after it has drained. Good: first token
and pace within the limits.

{render(report["runs"])}

![Good requests by split, fixed and as a start]({name}.png)

Run `{env["command"]}` at commit {env["commit"]}, {env["time"]}; {env["cpu"]}, {env["cores"]} cores.
"""


def render(runs: Sequence[dict[str, Any]]) -> str:
    """A Markdown table for each load and size."""
    lines: list[str] = []
    for load, workers in dict.fromkeys((r["load"], r["workers"]) for r in runs):
        rows = [r for r in runs if (r["load"], r["workers"]) == (load, workers)]
        best = max(r["goodput"] for r in rows if not r["auto"])
        lines += [
            f"{load}, {workers} workers, {rows[0]['requests']} requests in {rows[0]['seconds'] / 60:.0f} minutes:",
            "",
            "| roles | good | good req/s/GPU | of the best split | moves |",
            "|---|---:|---:|---:|---|",
            *(f"| {_row(row, best)} |" for row in rows),
            "",
        ]
    return "\n".join(lines).rstrip()


def _row(row: dict[str, Any], best: float) -> str:
    name, moves = row["start"], ""
    if row["auto"]:
        name = f"auto, from {row['start']}"
        mean_s = sum(m["took_s"] for m in row["moves"]) / max(1, len(row["moves"]))
        moves = f"{len(row['moves'])}, {mean_s:.0f} s each, ends as {row['ends_as']}" if row["moves"] else "0"
    share = row["goodput"] / best if best else 0.0
    return f"{name} | {row['good_share']:.0%} | {row['goodput']:.2f} | {share:.0%} | {moves}"


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Good requests by split, fixed and as a start: a panel for each load and size."""
    import matplotlib  # a dev extra; a headless backend before anything else

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys((r["load"], r["workers"]) for r in runs))
    columns = len({load for load, _ in cases})
    rows = -(-len(cases) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False)
    for panel, (load, workers) in zip(panels.flat, cases, strict=False):
        names = list(dict.fromkeys(r["start"] for r in runs if r["workers"] == workers))
        for auto, color, shift in ((False, "#9aa5b1", -0.2), (True, "#1f77b4", 0.2)):
            found = {r["start"]: r for r in runs if (r["load"], r["workers"], r["auto"]) == (load, workers, auto)}
            xs = [i + shift for i, name in enumerate(names) if name in found]
            ys = [100 * found[name]["good_share"] for name in names if name in found]
            panel.bar(xs, ys, width=0.38, color=color, label="auto roles, from there" if auto else "fixed")
        panel.set(title=f"{load}, {workers} workers", ylabel="good requests, %", ylim=(0, 100))
        panel.set_xticks(range(len(names)), names, fontsize=8)
        panel.grid(axis="y", alpha=0.3)
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    panels.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
