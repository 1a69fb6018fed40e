"""What prompts do to running answers: prefill and decode on a core each, beside a unified worker on the same two cores.

usage: python -m benchmarks.interference [--rounds 3] [--transfer-backend nixl] [--router-core prefill]
           [--checkpoint DIR] [--worker-flags "..."] [--output FILE]

Workload C of benchmarks/peer_loads.py: 4 long decodes, alone and while a prompt of 1024 tokens comes every second. The
figure is the p99 gap between two tokens of the long decodes, with the prompts over without. In PD each worker's whole
process tree (scheduler, HTTP, transfer threads) is pinned to its core; the router and this client share
the prefill worker's core (or --router-core decode), as in a real cluster they would have none of the decode worker's.
Unified: two threads, both cores. Alone and loaded take turns. Workers have made their KV memory ready before.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import pin, tandem_up
from benchmarks.cpu_use import cpu_use
from benchmarks.peer_loads import SEED_STEP, Server, interference, warm_up
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table

AIM = 1.3
PREFILL_CORE, DECODE_CORE = 0, 1
UNIFIED, PD = "unified, two threads", "prefill | decode, a core each"
Row = dict[str, Any]


def rounds_of(name: str, server: Server, *, rounds: int) -> list[Row]:
    """Two rows a round: the long decodes alone, and with prompts."""
    asyncio.run(warm_up(server))
    return [
        _run(name, server, seed=SEED_STEP * (number + 1), prompts=prompts)
        for number in range(rounds)
        for prompts in ((False, True) if number % 2 == 0 else (True, False))
    ]


def _run(name: str, server: Server, *, seed: int, prompts: bool) -> Row:
    with cpu_use() as used:
        found = asyncio.run(interference(server, seed=seed + 500 * prompts, prompts=prompts))
    row = {"name": name, "prompts_come": prompts, "cores_left": used.cores_left, **found}
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return row


def measure(model: Path, *, rounds: int, backend: str, router_core: int, flags: Sequence[str]) -> list[Row]:
    everywhere = os.sched_getaffinity(0)
    args = ("--model-path", str(model), "--prefault-kv", *flags)
    with tandem_up("--unified", "--num-threads", "2", *args) as cluster:
        rows = rounds_of(UNIFIED, Server(url=cluster.url, model=model.name), rounds=rounds)
    with tandem_up("--transfer-backend", backend, *args) as cluster:
        pin(cluster, {"prefill": (PREFILL_CORE,), "decode": (DECODE_CORE,), "router": (router_core,)})
        os.sched_setaffinity(0, {router_core})
        try:
            rows += rounds_of(PD, Server(url=cluster.url, model=model.name), rounds=rounds)
        finally:
            os.sched_setaffinity(0, everywhere)
    return rows


def ratio(rows: Sequence[Row], name: str) -> float:
    """p99 gap under prompts over the p99 gap without: of the medians of the rounds."""
    return _median(rows, name, True, "itl_p99_ms") / _median(rows, name, False, "itl_p99_ms")


def _median(rows: Sequence[Row], name: str, prompts: bool, key: str) -> float:
    return median(row[key] for row in rows if row["name"] == name and row["prompts_come"] is prompts)


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    rows = result["rows"]
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        for prompts in (False, True):
            keys = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "output_tok_s")
            found = [f"{_median(rows, name, prompts, key):.0f}" for key in keys]
            ttft = f"{_median(rows, name, True, 'ttft_p50_ms'):.0f}" if prompts else ""
            lines.append(
                [
                    f"{name}, {'prompts come' if prompts else 'alone'}",
                    *found,
                    ttft,
                    f"{_median(rows, name, prompts, 'cores_left'):.1f}",
                    f"{ratio(rows, name):.2f}" if prompts else "",
                ]
            )
    header = [
        "4 long decodes",
        "ITL p50 ms",
        "p99",
        "max",
        "tok/s",
        "prompts' TTFT p50 ms",
        "cores left",
        "p99, over alone",
    ]
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transfer-backend", default="nixl", choices=("nixl", "mooncake"))
    parser.add_argument("--router-core", default="prefill", choices=("prefill", "decode"))
    parser.add_argument("--checkpoint", type=Path, help="of benchmarks.random_model; default: one is made")
    parser.add_argument("--worker-flags", default="", help="more flags of every worker")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the clusters end with us
    with ExitStack() as stack:
        model = args.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-c-")))
        if not args.checkpoint:
            write_model(model)
        rows = measure(
            model,
            rounds=args.rounds,
            backend=args.transfer_backend,
            router_core=PREFILL_CORE if args.router_core == "prefill" else DECODE_CORE,
            flags=args.worker_flags.split(),
        )
    result = {"environment": environment.describe(), "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
