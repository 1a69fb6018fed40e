"""Tandem's unified worker beside vLLM's CPU build, `transformers serve` and llama.cpp: the same weights, loads and client.

usage: bash benchmarks/make_peers.sh DIR; python -m benchmarks.peers [--peers DIR] [--turns 2] [--rounds 2] [--models NAME ...]
           [--weights bf16 Q8_0 Q4_0] [--workloads ABCD18] [--only NAME ...] [--keep] [--page]
       (`make bench-peers` keeps a run)

Two models: random weights in the shape of Qwen3-0.6B with a small vocabulary, and SmolLM2-135M. In bf16 all engines get workloads A to D
(benchmarks/peer_loads.py). Integers are those of GGUF files that llama.cpp made, read by llama.cpp and by Tandem: one stream, and eight.
One server is up at a time, with all cores of the machine, and gets all rounds of its workloads; then the next; and so on for some turns,
the order of each turn reversed. Figures are medians of a server's rounds. Slow servers get one round, and no workload C, whose prompts
would queue for minutes. Beside them stands how many cores were left to us: on a shared
machine ratios of turns that differ in it mean little. `--keep`: as this kind of CPU's file in docs/reports/peers, from which
docs/reports/peers.md is written; `--page`: only that. With TANDEM_CPU_KIND the peers that can be held to that kind are.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_use import cpu_use
from benchmarks.peer_loads import SEED_STEP, Server, run_workload, warm_up
from benchmarks.peer_models import BF16, QUANTIZED, SHAPE, SMOLLM2, PeerModel, make_models
from benchmarks.peer_servers import FOLDERS, LLAMA, TANDEM, TRANSFORMERS, Start, installed, quantizer, starters
from deploy.bench import environment
from deploy.bench.stats import table
from engine.device.machine import cpu_kind
from engine.kernels.build import KIND_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "reports" / "peers"
PAGE = KEPT.with_suffix(".md")
Row = dict[str, Any]

IN_FLOATS, IN_INTEGERS = "ABCD", "18"
SLOW, TOO_LONG = (TRANSFORMERS, LLAMA), "C"  # servers in bf16, and the workload that they do not get
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TITLES, COLUMNS, COMPARED = (_DATA[name] for name in ("titles", "columns", "compared"))


def measure(starts: Mapping[str, Start], model: PeerModel, weights: str, args: argparse.Namespace) -> Iterator[Row]:
    """One row a (server, workload, round)."""
    for turn in range(args.turns):
        for name in list(starts) if turn % 2 == 0 else reversed(list(starts)):
            is_slow = weights == BF16 and name in SLOW
            if is_slow and turn:
                continue
            with starts[name](model) as server:
                asyncio.run(warm_up(server))
                for number in range(turn * args.rounds, turn * args.rounds + (1 if is_slow else args.rounds)):
                    for workload in _workloads(args.workloads, weights, is_slow=is_slow):
                        found = _round(workload, server, number)
                        yield {"model": model.name, "weights": weights, "server": name} | found


def _workloads(asked: str, weights: str, *, is_slow: bool) -> list[str]:
    there = IN_FLOATS if weights == BF16 else IN_INTEGERS
    return [name for name in asked if name in there and not (is_slow and name in TOO_LONG)]


def _round(workload: str, server: Server, number: int) -> Row:
    with cpu_use() as used:
        found = asyncio.run(run_workload(workload, server, seed=SEED_STEP * (number + 1)))
    return {"workload": workload, "round": number, "cores_left": used.cores_left, **found}


def medians(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """server -> figure -> the median of its rounds."""
    return {
        name: {key: median(row[key] for row in rows if row["server"] == name) for key in (*COLUMNS, "cores_left")}
        for name in dict.fromkeys(row["server"] for row in rows)
    }


def render(result: dict[str, Any]) -> str:
    """A table for each model, its weights, and workload."""
    parts = []
    for model, weights in dict.fromkeys((row["model"], row["weights"]) for row in result["rows"]):
        parts.append(f"### {model}, {weights}")
        own = [row for row in result["rows"] if (row["model"], row["weights"]) == (model, weights)]
        for workload in sorted({row["workload"] for row in own}):
            parts.append(_table(TITLES[workload], medians([row for row in own if row["workload"] == workload])))
    return "\n\n".join([*parts, _versions(result["peers"])])


def _table(title: str, servers: Mapping[str, Mapping[str, float]]) -> str:
    ours = servers.get(TANDEM)
    lines = []
    for name, figures in servers.items():
        ratios = [f"{ours[key] / figures[key]:.2f}" if ours else "" for key in COMPARED]
        lines.append([name, *(f"{figures[key]:.0f}" for key in COLUMNS), f"{figures['cores_left']:.1f}", *ratios])
    return table([title, *COLUMNS.values(), "cores left", *COMPARED.values()], lines)


def _versions(peers: Mapping[str, str]) -> str:
    there = "; ".join(f"{name}: {versions}" for name, versions in peers.items()) or "none of the peers"
    missing = [name for name in FOLDERS if name not in peers]
    return f"Installed: {there}." + (f" Not measured: {', '.join(missing)}." if missing else "")


def page(results: Mapping[str, dict[str, Any]]) -> str:
    """Return docs/reports/peers.md from runs by kind of CPU."""
    parts = []
    for kind, result in results.items():
        env = result["environment"]
        said = f"`{env['command']}` on {env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB; commit {env['commit']}, {env['time']}."
        title = f"{kind}, on a CPU that has more" if result["is_held"] else kind
        parts.append(f"## {title}\n\n{said}\n\n{render(result)}\n")
    return Path(__file__).with_suffix(".md").read_text() + "\n" + "\n".join(parts)


def kept() -> dict[str, dict[str, Any]]:
    runs = [json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))]
    return {run["cpu_kind"]: run for run in runs}


def run(args: argparse.Namespace) -> dict[str, Any]:
    quantize, rows = quantizer(args.peers), list[Row]()
    with tempfile.TemporaryDirectory(prefix="tandem-peers-") as folder:
        for model in make_models(Path(folder), args.models, quantize=quantize):
            for weights in args.weights if quantize else [BF16]:
                found = starters(args.peers, weights=weights)
                starts = {name: start for name, start in found.items() if not args.only or name in args.only}
                for row in measure(starts, model, weights, args):
                    rows.append(row)
                    print(
                        json.dumps({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}),
                        flush=True,
                    )
    kind, is_held = cpu_kind("bfloat16"), KIND_VARIABLE in os.environ
    there = {
        name: versions for name, versions in installed(args.peers).items() if any(row["server"] == name for row in rows)
    }
    return {"environment": environment.describe(), "cpu_kind": kind, "is_held": is_held, "peers": there, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=ROOT / ".build" / "peers", help="where make_peers.sh put them")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=(SHAPE, SMOLLM2), default=[SHAPE, SMOLLM2])
    parser.add_argument("--weights", nargs="+", choices=(BF16, *QUANTIZED), default=[BF16, *QUANTIZED])
    parser.add_argument("--workloads", default=IN_FLOATS + IN_INTEGERS)
    parser.add_argument("--only", action="append", help="a server to measure; repeatable")
    parser.add_argument(
        "--keep", action="store_true", help="keep the run as that of this kind of CPU, and write the page"
    )
    parser.add_argument(
        "--page", action="store_true", help="write the page from the runs that are kept, and measure nothing"
    )
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(kept()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers' groups end with us
    result = run(args)
    print(render(result))
    if args.keep:
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{result['cpu_kind']}.json").write_text(json.dumps(result, indent=1) + "\n")
        PAGE.write_text(page(kept()))


if __name__ == "__main__":
    main()
