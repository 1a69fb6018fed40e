"""Where to prefill: goodput and TTFT of six loads by each fixed choice of a route, and by the router's decision.

usage: python -m benchmarks.where planned --traces FOLDER [--loads ...] [--choices ...] [--jobs 2]    the virtual world
       python -m benchmarks.where served --traces FOLDER [--loads ...] [--requests 40] [--rounds 2]    real processes on two cores
       python -m benchmarks.where page                                                                 the page again, from the JSON
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT
from benchmarks.where import page, planned, served
from benchmarks.where.loads import LOADS, SHORT
from deploy.bench.environment import describe
from tools.progress import progress

REPORT = ROOT / "docs" / "reports" / "where.json"


def main() -> int:
    args = _arguments()
    found = json.loads(args.report.read_text()) if args.report.exists() else {}
    if args.what != "page":
        {"planned": _planned, "served": _served}[args.what](args, found)
        args.report.write_text(json.dumps(found, indent=1) + "\n")
    page.write(args.report, found)
    return 0


def _served(args: argparse.Namespace, found: dict[str, Any]) -> None:
    loads = [one for one in SHORT if one.name in args.loads]
    plays, talks = len(loads) * len(served.CHOICES) * (args.rounds + 1), (len(served.CHOICES) + 1) * (args.talks + 1)
    with progress(1 + talks + plays, unit="play") as bar:

        def tell(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        measured = served.measure(
            traces=args.traces,
            layers=args.layers,
            requests=args.requests,
            rounds=args.rounds,
            talks=args.talks,
            loads=loads,
            tell=tell,
        )
    env, kept = describe(), found.get("served", {})
    if kept.get("layers") != args.layers:
        kept = {"loads": {}, "turns": {}}
    for part in ("loads", "turns"):  # what this run has not measured stays
        measured[part] = kept[part] | {name: {**of, "commit": env["commit"]} for name, of in measured[part].items()}
    found["served"] = measured | {"environment": env, "layers": args.layers}


def _planned(args: argparse.Namespace, found: dict[str, Any]) -> None:
    loads = [one for one in LOADS if one.name in args.loads]
    cells = [
        planned.Cell(load=load, choice=choice, traces=args.traces, gpu=args.gpu)
        for load in loads
        for choice in args.choices
    ]
    with progress(len(cells), unit="search") as bar:
        for cell in planned.measure(cells, jobs=args.jobs):
            cell["environment"] = describe()
            found.setdefault("planned", {}).setdefault(cell["load"], {})[cell["choice"]] = cell
            args.report.write_text(json.dumps(found, indent=1) + "\n")  # an interrupted run leaves what it has found
            bar.update()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.where", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [one.name for one in LOADS]
    parser.add_argument("what", choices=("planned", "served", "page"))
    parser.add_argument("--traces", default=".", help="folder of Mooncake's traces (FAST'25)")
    parser.add_argument("--loads", nargs="*", default=names, choices=names)
    parser.add_argument("--choices", nargs="+", default=list(planned.CHOICES), choices=list(planned.CHOICES))
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40, help="served: of a play")
    parser.add_argument("--rounds", type=int, default=2, help="served: plays of each choice")
    parser.add_argument("--talks", type=int, default=4, help="served: conversations of the figure of turns")
    parser.add_argument("--layers", type=int, default=4, help="served: of the random model, as wide as Qwen3-0.6B")
    parser.add_argument("--report", type=Path, default=REPORT)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
