"""`make rank-faults`: every rank of a worker is killed or stopped in every phase; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.matrix [--cells 'kill:prefill:*'] [--report FILE]
"""

import argparse
import asyncio
import fnmatch
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.faults.lane import on_one_cluster
from tools.faults.ranks.rig import RankCell, RankRig, rank_cells
from tools.faults.ranks.run import RankResult, run_rank_cell
from tools.faults.report import RANK_FAULTS, begun, keep


def run(patterns: list[str], report: dict[str, Any], path: Path) -> int:
    """Run cells that match, one cluster for all of a backend until one fails; return how many failed."""
    cells = [cell for cell in rank_cells() if any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in patterns)]
    seeds = {cell: 1000 * number for number, cell in enumerate(cells)}

    def play(rig: RankRig, cell: RankCell) -> RankResult:
        return asyncio.run(run_rank_cell(rig, cell, seed=seeds[cell]))

    for _, group in groupby(cells, key=lambda cell: cell.backend):
        for cell, result, rig in on_one_cluster(group, lambda cell: RankRig(cell.backend), play):
            verdict = "ok    " if result.ok else "FAILED"
            print(f"{verdict} {cell.name} {result.ended_s:.2f} s {result.said} {result.problems}", flush=True)
            report["cells"][cell.name] = result.to_json()
            keep(path, report)
            for part in rig.parts.values() if rig is not None and not result.ok else ():
                print(f"---- {part.name}\n{part.log_tail(3000).decode(errors='replace')}", file=sys.stderr, flush=True)
    return sum(not report["cells"][cell.name]["ok"] for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.ranks.matrix", description="faults of single ranks")
    parser.add_argument("--cells", nargs="+", default=["*"], help="fault:part:rank:phase:backend, * is a wildcard")
    parser.add_argument("--report", type=Path, default=RANK_FAULTS)
    args = parser.parse_args()
    return 1 if run(args.cells, begun(args.report, "cells"), args.report) else 0


if __name__ == "__main__":
    sys.exit(main())
