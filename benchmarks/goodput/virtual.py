"""Goodput of pairs, of unified workers and of mixed pools (`tandem router --mixed`) on as many GPUs, for several shapes of requests.

usage: python -m benchmarks.goodput.virtual [--trace PATH] [--workers 3] [--jobs 2] [--report docs/reports/goodput_h200]

Clusters are those of `tandem plan` (docs/planning.md): real scheduler and roles, and the router's own choice of ways. A step takes
what it took on an H200 (docs/reports/gpu_check.json: prefills, decode steps and decode attention of Qwen3-8B's shape); the network
is the data sheet's. Goodput: the highest rate at which 95 % of the requests keep the objectives of their shape. `python -m benchmarks.goodput
--page` then writes the page.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.goodput.layouts import KINDS
from benchmarks.gpu.target import QWEN3_8B
from deploy.bench.environment import describe
from deploy.bench.report import table
from planner.config import PlanConfig
from planner.goodput import Point
from planner.gpus import GPUS
from planner.layout import ClusterLayout, parse_layout
from planner.profile import Profile
from planner.run import Outcome, run_plan
from planner.step_time import Fitted
from planner.study import study_of

MEASURED = Path("docs/reports/gpu_check.json")
NAME = "goodput_h200"  # of its report
PERCENT = 95.0
SEED = 11
CHAT, TALK, LONG = ((300, 2000), (50, 150)), ((100, 800), (150, 350)), ((3000, 12000), (50, 150))  # tokens in, out


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`mix`: (share, (tokens in, tokens out)) of its requests. Objectives in seconds."""

    name: str
    mix: Sequence[tuple[float, tuple[tuple[int, int], tuple[int, int]]]]
    ttft_s: float
    tpot_s: float = 0.01
    itl_s: float = 0.03


LOADS = (
    Load(name="chat", mix=[(1.0, CHAT)], ttft_s=1.0),
    Load(name="chat, patient", mix=[(1.0, CHAT)], ttft_s=0.5, tpot_s=0.025, itl_s=0.2),
    Load(name="long answers", mix=[(1.0, TALK)], ttft_s=1.0),
    Load(name="long prompts", mix=[(1.0, LONG)], ttft_s=3.0),
    Load(name="chat and long prompts", mix=[(0.85, CHAT), (0.15, LONG)], ttft_s=2.0),
)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    report: dict[str, Any] = {"environment": describe(), "loads": []}
    with tempfile.TemporaryDirectory(prefix="tandem-mixed-") as name:
        folder = Path(name)
        write_hardware(folder)
        for load, config in plans(args, folder):
            study = study_of(config)
            report["hardware"] = study.hardware.text + "; " + study.hardware.assumed
            report["loads"].append(load_entry(load, config, run_plan(study)))
            print(render(report["loads"][-1:]) + "\n", flush=True)
            if args.report:
                write(report, args.report)
    return 0


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write what is known so far as JSON and picture."""
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    plot(report["loads"], path.with_suffix(".png"))


def write_hardware(folder: Path) -> None:
    """Write model and profile of the measured GPU into `folder`."""
    shape = QWEN3_8B
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    parts = json.loads(MEASURED.read_text())["parts"]
    source = f"step times measured on an H200 ({MEASURED})"
    profile = Profile(step_time=measured(parts), gpu=GPUS["H200"], source=source)
    (folder / "profile.json").write_bytes(msgspec.json.encode(profile))


def measured(parts: Mapping[str, Any]) -> Fitted:
    """Return the costs of steps that explain what was measured.

    Attention was measured alone: it is the part that grows with pairs, and with context. The rest of a prefill is a line through two
    lengths; the rest of a decode step did not grow with the batch (1 to 64) beyond its attention.
    """
    prefill, (short,) = (
        parts["prefill"],
        [row for row in parts["short_prompts"]["rows"] if row["tokens"] == 512 and row["graphs"]],
    )
    attention_s = _kernel_s(prefill["kernels"], "extend_kernel")
    pair_s = attention_s / (prefill["tokens"] ** 2 / 2)
    rest_s = prefill["ms"] / 1000 - attention_s, short["ms"] / 1000 - pair_s * short["tokens"] ** 2 / 2
    token_s = (rest_s[0] - rest_s[1]) / (prefill["tokens"] - short["tokens"])
    by_batch = {row["batch"]: row for row in parts["decode"]["rows"] if row["graphs"]}
    alone, together = by_batch[1], by_batch[64]
    context = parts["decode"]["context"]
    context_s = (together["ms"] - alone["ms"]) / 1000 / (63 * context)
    return Fitted(
        prefill_step_s=rest_s[1] - token_s * short["tokens"],
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        decode_step_s=alone["ms"] / 1000 - context_s * context,
        decode_request_s=0.0,
        decode_context_s=context_s,
    )


def _kernel_s(kernels: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(float(row["us"]) for row in kernels if row["kernel"] == name) / 1e6


def plans(args: argparse.Namespace, folder: Path) -> list[tuple[Load, PlanConfig]]:
    """The synthetic loads, and the trace: its objectives are those of long prompts."""
    found = []
    for load in LOADS:
        if not args.loads or load.name in args.loads:
            path = folder / f"{load.name}.jsonl"
            path.write_text(trace_of(load, args.num_requests))
            found.append((load, path))
    if args.trace:
        found.append((Load(name=Path(args.trace).name.partition("_")[0], mix=[], ttft_s=5.0), args.trace))
    return [
        (load, _plan(load, str(path), args, folder, args.layouts or layouts(size)))
        for size in args.workers
        for load, path in found
    ]


def trace_of(load: Load, count: int) -> str:
    """Poisson arrivals; no two prompts share a prefix."""
    rng, at_ms, lines = random.Random(SEED), 0.0, []
    for number in range(count):
        (lengths,) = rng.choices([one for _, one in load.mix], [share for share, _ in load.mix])
        tokens_in, tokens_out = (rng.randint(*bounds) for bounds in lengths)
        row = {"timestamp": at_ms, "input_length": tokens_in, "output_length": tokens_out, "hash_ids": [number]}
        lines.append(json.dumps(row))
        at_ms += 1000 * rng.expovariate(1.0)
    return "\n".join(lines)


def _plan(load: Load, trace: str, args: argparse.Namespace, folder: Path, names: Sequence[str]) -> PlanConfig:
    return PlanConfig(
        model_path=str(folder),
        gpu_profile=str(folder / "profile.json"),
        trace=trace,
        num_requests=args.num_requests,
        slo_ttft_s=load.ttft_s,
        slo_tpot_s=load.tpot_s,
        slo_itl_s=load.itl_s,
        slo_percent=PERCENT,
        mixed_chunk_size=512,
        layouts=tuple(names),
        jobs=args.jobs,
    )


def layouts(workers: int) -> list[str]:
    """Unified workers, every split, and every mixed pool; unified workers run answers in the steps of prompts, as by default."""
    pairs = [(p, workers - p) for p in range(1, workers)]
    pools = [(p, d, workers - p - d) for p in range(1, workers) for d in range(1, workers - p)]
    found = [ClusterLayout(unified=workers, mixed=True)]
    found += [ClusterLayout(prefill=p, decode=d) for p, d in pairs]
    found += [ClusterLayout(prefill=p, decode=d, unified=u, mixed=True) for p, d, u in pools]
    return [layout.name for layout in found]


def load_entry(load: Load, config: PlanConfig, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "load": load.name,
        "gpus": parse_layout(config.layouts[0]).num_gpus,
        "objectives": {"ttft_s": load.ttft_s, "tpot_s": load.tpot_s, "itl_s": load.itl_s, "percent": PERCENT},
        "requests": config.num_requests,
        "layouts": [
            {"layout": one.layout.name, "kind": kind_of(one.layout), "goodput": one.rate, "best": _row(one.best)}
            for one in outcomes
        ],
    }


def kind_of(layout: ClusterLayout) -> str:
    return "mixed pool" if layout.is_mixed_pool else "unified" if layout.unified else "pairs"


def _row(point: Point | None) -> Any:
    return None if point is None else msgspec.to_builtins(point)


def best_of(load: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return dict(max((row for row in load["layouts"] if row["kind"] == kind), key=lambda row: row["goodput"]))


def render(loads: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for each load: the best layout of each kind, and which kind wins."""
    rows = []
    for load in loads:
        best = {kind: best_of(load, kind) for kind in KINDS}
        wins = max(KINDS, key=lambda kind: float(best[kind]["goodput"]))
        cells = [f"{best[kind]['goodput']:.3g} ({best[kind]['layout']})" for kind in KINDS]
        rows.append([load["load"], _wanted(load["objectives"]), str(load["gpus"]), *cells, wins])
    return table(["load", "objectives, ms", "GPUs", *KINDS, "wins"], rows)


def _wanted(objectives: Mapping[str, float]) -> str:
    return ", ".join(f"{1000 * objectives[name]:g}" for name in ("ttft_s", "tpot_s", "itl_s"))


def steadiness(loads: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[float]]]:
    """(layout, its goodput on each load over the best there), the best worst case first."""
    best = [max(row["goodput"] for row in load["layouts"]) for load in loads]
    names = [row["layout"] for row in loads[0]["layouts"]]
    shares = {
        name: [
            next(row["goodput"] for row in load["layouts"] if row["layout"] == name) / most if most else 0.0
            for load, most in zip(loads, best, strict=True)
        ]
        for name in names
    }
    return sorted(shares.items(), key=lambda item: -min(item[1]))


def on_every_load(loads: Sequence[Mapping[str, Any]]) -> str:
    """A table for each number of GPUs: each layout on every load."""
    parts = []
    for gpus in dict.fromkeys(load["gpus"] for load in loads):
        alike = [load for load in loads if load["gpus"] == gpus]
        rows = [
            [name, *(f"{share:.0%}" for share in shares), f"{min(shares):.0%}"] for name, shares in steadiness(alike)
        ]
        parts.append(table([f"{gpus} GPUs", *(load["load"] for load in alike), "least"], rows))
    return "\n\n".join(parts)


def section(report: Mapping[str, Any]) -> str:
    """Write this study's part of docs/reports/goodput.md."""
    env, loads = report["environment"], report["loads"]
    return f"""## On three simulated GPUs

What it measures: [router.md](../router.md#mixed-pools). With {report["hardware"]}. Requests a second and GPU of which {PERCENT:g} % keep the
objectives: time to first token, mean time between tokens, and the longest gap of {PERCENT:g} % of a request's. The best layout of each
kind:

{render(loads)}

One cluster for all loads: each layout's goodput as a share of the best one's on that load, and the least of these:

{on_every_load(loads)}

![Goodput of each layout, by load]({NAME}.png)

Run `{env["command"]}` at commit {env["commit"]}, {env["time"]}; simulated on {env["cpu"]}, {env["cores"]} cores.
"""


def plot(loads: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each load, a bar for each layout, coloured by kind."""
    import matplotlib  # a dev extra; a headless backend before anything else

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = dict(zip(KINDS, ("#9aa5b1", "#1f77b4", "#e07b39"), strict=True))
    rows, columns = len({load["gpus"] for load in loads}), len({load["load"] for load in loads})
    figure, panels = plt.subplots(rows, columns, figsize=(4.0 * columns, 2.6 * rows), squeeze=False)
    for panel, load in zip(panels.flat, loads, strict=False):
        rows = load["layouts"]
        panel.barh(
            [row["layout"] for row in rows],
            [row["goodput"] for row in rows],
            color=[colors[row["kind"]] for row in rows],
        )
        panel.invert_yaxis()
        panel.set(title=f"{load['load']}, {load['gpus']} GPUs", xlabel="good requests a second and GPU")
        panel.tick_params(axis="y", labelsize=7)
        panel.grid(axis="x", alpha=0.3)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[kind]) for kind in KINDS]
    for panel in panels.flat[len(loads) :]:
        panel.set_visible(False)
    panels.flat[0].legend(handles, KINDS, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput.virtual", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--trace", help="also a trace: JSON lines, may be gzipped")
    parser.add_argument("--loads", nargs="+", default=[], choices=[load.name for load in LOADS])
    parser.add_argument("--workers", type=int, nargs="+", default=[3], help="sizes of the cluster")
    parser.add_argument("--layouts", nargs="+", default=[], type=lambda text: parse_layout(text).name)
    parser.add_argument("--num-requests", type=int, default=400, help="in each run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", type=Path, help="write this name with .json and .png (needs matplotlib)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
