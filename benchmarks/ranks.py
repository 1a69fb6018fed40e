"""What ranks of one machine cost: docs/reports/ranks.md, part by part.

usage: python -m benchmarks.ranks [--parts allreduce ...] [--rounds 7] [--report docs/reports/ranks.json]

A part that is not named keeps its figures in the report, with the machine and the commit that they are from.
"""

import argparse
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.rank_parts import allreduce, engines, plan_channel, transfers
from deploy.bench import environment

PARTS: dict[str, ModuleType] = {
    "allreduce": allreduce,
    "plan_channel": plan_channel,
    "transfers": transfers,
    "engines": engines,
}


def page(report: dict[str, Any]) -> str:
    """Write the text of docs/reports/ranks.md."""
    parts = ["# Ranks of one model", "", "`python -m benchmarks.ranks` writes this page. Do not edit it by hand."]
    for name in PARTS:
        if name in report:
            parts += ["", render(name, report[name])]
    return "\n".join(parts) + "\n"


def render(name: str, found: dict[str, Any]) -> str:
    part, env = PARTS[name], found["environment"]
    where = f"`{env['command']}` on {env['cpu']}, {env['cores']} cores; load average {found['load_average'][0]:.1f}"
    return f"## {part.TITLE}\n\n{part.TEXT}\n\n{part.render(found['figures'])}\n\n{where}; commit {env['commit']}, {env['time']}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text()) if args.report and args.report.exists() else {}
    for name in args.parts:
        figures = PARTS[name].measure(rounds=args.rounds)
        report[name] = {
            "environment": environment.describe(),
            "load_average": os.getloadavg(),  # of the run: it is a minute's
            "figures": figures,
        }
        print(render(name, report[name]) + "\n", flush=True)
        if args.report:
            args.report.write_text(json.dumps(report, indent=1) + "\n")
            args.report.with_suffix(".md").write_text(page(report))


if __name__ == "__main__":
    main()
