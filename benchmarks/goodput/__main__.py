"""Goodput of unified workers, pairs and a mixed pool on the same cores, measured.

usage: python -m benchmarks.goodput [--trace PATH] [--loads ...] [--layouts ...] [--requests 160] [--layers 8] [--report docs/reports/goodput]
       python -m benchmarks.goodput --page          write page and pictures again from the JSON

Goodput: the highest rate (requests a second) at which 95 % of the requests keep the objectives of their load. Real processes, HTTP and
NIXL; each worker is pinned to its cores (layouts.py). Without --trace, lengths are drawn as in Mooncake's conversation trace (FAST'25:
github.com/kvcache-ai/Mooncake, FAST25-release/traces). What is measured first (calibrate.py) gives the objectives. The JSON is written after each run: an interrupted measurement goes on
with the same command.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.goodput import page, results
from benchmarks.goodput.bench import Bench
from benchmarks.goodput.layouts import LAYOUTS, pinning
from benchmarks.goodput.loads import LOADS, from_entries, like_conversations
from benchmarks.random_model import write_model
from deploy.bench.environment import describe
from deploy.bench.workload import read_trace
from service.flags import ConfigError
from tools.progress import progress

KV_TOKENS = 24576  # of a worker
RUNS = 4  # of a search, usually


def main() -> int:
    args = _arguments()
    path = args.report.with_suffix(".json")
    try:
        if not args.page:
            measure(args, path)
        page.write(args.report)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def measure(args: argparse.Namespace, path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the clusters end with us
    loads = [one for one in LOADS if one.name in args.loads]
    layouts = [one for one in LAYOUTS if one.name in args.layouts]
    cores = sorted(os.sched_getaffinity(0))
    pinning(layouts[-1], cores)  # says what it needs before anything starts
    source = from_entries(read_trace(args.trace), args.requests) if args.trace else like_conversations(args.requests)
    arguments = {
        "trace": Path(args.trace).name.partition("_")[0] if args.trace else None,
        "requests": args.requests,
        "layers": args.layers,
        "cores": len(cores),
    }
    found = results.begin(path, describe(), arguments, anew=args.anew)
    with tempfile.TemporaryDirectory(prefix="tandem-goodput-") as name, progress(None, unit="run") as bar:
        folder = Path(name)
        write_model(folder / "model", layers=args.layers)
        bench = Bench(
            cores=cores,
            flags=_flags(folder / "model"),
            source=source,
            results=found,
            path=path,
            bar=bar,
        )
        bench.begin(loads, layouts)
        bar.total = RUNS * len(loads) * len(layouts)
        bar.update(sum(len(one.points) for one in found.cells))
        for layout in layouts:
            bench.measure(layout, loads)


def _flags(model: Path) -> tuple[str, ...]:
    tokens = ("--max-total-tokens", str(KV_TOKENS))
    return ("--model-path", str(model), *tokens, "--log-level", "warning")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", help="JSON lines as Mooncake's, may be gzipped: lengths, prefixes and arrivals")
    parser.add_argument("--loads", nargs="+", default=[one.name for one in LOADS], choices=[one.name for one in LOADS])
    parser.add_argument(
        "--layouts", nargs="+", default=[one.name for one in LAYOUTS], choices=[one.name for one in LAYOUTS]
    )
    parser.add_argument("--requests", type=int, default=160, help="at most, of a run")
    parser.add_argument("--layers", type=int, default=8, help="of the random model, as wide as Qwen3-0.6B")
    parser.add_argument(
        "--report", type=Path, default=page.REPORT, help="name of JSON, page and pictures, without an ending"
    )
    parser.add_argument("--anew", action="store_true", help="begin again, whatever the report holds")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
