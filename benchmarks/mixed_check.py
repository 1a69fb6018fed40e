"""Whether a real mixed pool sends prompts where the planned one does: the same requests to `tandem up --mixed 1` and to the planner.

usage: python -m benchmarks.mixed_check [--requests 80] [--rate 0.8] [--report FILE.json]

A random checkpoint (benchmarks/random_model.py) serves one long prompt in five on a pair and a unified worker that share this machine.
The plan takes the step times of docs/reports/plan_error.json, which were measured with the same model, and a core for each. Figures are the mean length of
the prompts that each role computed, and its share of the requests; a direction, not a speed, so other load does no harm.
"""

import argparse
import json
import random
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import load_records, tandem_up
from benchmarks.random_model import write_model
from deploy.bench.environment import describe
from deploy.bench.report import table
from planner.config import PlanConfig
from planner.layout import parse_layout
from planner.profile import Profile
from planner.study import planned_cluster, study_of

LAYERS = 12  # as in docs/reports/plan_error.json
SHORT, LONG, ANSWER = (16, 64), (600, 1000), (8, 32)  # tokens
TTFT_S, ITL_S = 6.0, 0.15
ROLES = ("prefill", "unified")


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="tandem-mixed-") as name:
        folder = Path(name)
        write_model(folder / "model", layers=LAYERS)
        (folder / "trace.jsonl").write_text(_trace(args.requests, args.rate))
        report = {"environment": describe(), "real": _real(folder, args.requests), "planned": _planned(folder, args)}
    rows = [
        [side, role, f"{report[side][role]['requests']}", f"{report[side][role]['mean_prompt']:.0f}"]
        for side in ("real", "planned")
        for role in ROLES
    ]
    print(table(["", "prompts computed by", "requests", "mean prompt, tokens"], rows))
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")


def _real(folder: Path, count: int) -> dict[str, Any]:
    flags = (
        "--model-path",
        str(folder / "model"),
        "--mixed",
        "1",
        "--mixed-ttft",
        str(TTFT_S),
        "--mixed-itl",
        str(ITL_S),
        "--disable-moves",  # workers that share cores fall silent
    )
    with tandem_up(*flags) as cluster:
        load_records(url=cluster.url, prompt="ids", trace=str(folder / "trace.jsonl"), num_requests=count)
        with urllib.request.urlopen(f"{cluster.url}/workers", timeout=10) as response:
            workers = json.load(response)["workers"]
    return {
        worker["role"]: _counted(worker["assigned_total"], worker["report"]["prompt_tokens_total"])
        for worker in workers
        if worker["role"] in ROLES
    }


def _planned(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    found = json.loads(Path("docs/reports/plan_error.json").read_text())
    profile = msgspec.convert({name: found[name] for name in ("step_time", "outside_s", "handover")}, Profile)
    (folder / "profile.json").write_bytes(msgspec.json.encode(profile))
    config = PlanConfig(
        model_path=str(folder / "model"),
        gpu_profile=str(folder / "profile.json"),
        trace=str(folder / "trace.jsonl"),
        num_requests=args.requests,
        max_total_tokens=65536,
        page_size=16,
        chunked_prefill_size=2048,
        slo_ttft_s=TTFT_S,
        slo_tpot_s=ITL_S,
    )
    study = study_of(config)
    planned = planned_cluster(study, parse_layout("1P1D1U-mixed"))
    planned.run(study.requests, rate=args.rate, until_s=float("inf"))
    found = {}
    for one, worker in planned.routing.workers.items():
        if one.spec.role in ROLES:
            assert one.state is not None
            found[one.spec.role] = _counted(worker.assigned_total, one.state.counters["prompt_tokens"])
    return found


def _counted(requests: int, tokens: float) -> dict[str, float]:
    return {"requests": requests, "mean_prompt": tokens / max(1, requests)}


def _trace(count: int, rate: float) -> str:
    """Poisson arrivals; no two prompts share a prefix."""
    rng, at_ms, lines = random.Random(7), 0.0, []
    for number in range(count):
        tokens = rng.randint(*(LONG if rng.random() < 0.2 else SHORT))
        row = {"timestamp": at_ms, "input_length": tokens, "output_length": rng.randint(*ANSWER)}
        lines.append(json.dumps(row | {"hash_ids": [2 * number, 2 * number + 1]}))
        at_ms += 1000 * rng.expovariate(rate)
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
