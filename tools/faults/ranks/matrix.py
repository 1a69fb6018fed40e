"""`make rank-faults`: every rank of a worker is killed or stopped in every phase; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.matrix [--cells 'kill:prefill:*'] [--report FILE]
"""

import argparse
import asyncio
import fnmatch
import sys
from pathlib import Path
from typing import Any

from tools.faults.ranks.cells import rank_cells
from tools.faults.ranks.report import REPORT, begun, keep
from tools.faults.ranks.rig import RankRig
from tools.faults.ranks.run import run_rank_cell


def run(patterns: list[str], report: dict[str, Any], path: Path) -> int:
    """Run cells that match, one cluster for all of a backend until one fails; return how many failed."""
    cells = [cell for cell in rank_cells() if any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in patterns)]
    rig: RankRig | None = None
    failed = 0
    try:
        for number, cell in enumerate(cells):
            if rig is not None and rig.backend != cell.backend:
                rig = _closed(rig)
            if rig is None:
                rig = RankRig(cell.backend)
                rig.start_all()
            result = asyncio.run(run_rank_cell(rig, cell, seed=1000 * number))
            print(
                f"{'ok    ' if result.ok else 'FAILED'} {cell.name} {result.ended_s:.2f} s {result.said} {result.problems}",
                flush=True,
            )
            report["cells"][cell.name] = result.to_json()
            keep(report, path)
            if not result.ok:
                failed += 1
                for name in ("prefill", "decode"):
                    print(f"---- {name}\n{rig.log(name)[-3000:]}", file=sys.stderr, flush=True)
                rig = _closed(rig)
    finally:
        if rig is not None:
            _closed(rig)
    return failed


def _closed(rig: RankRig) -> None:
    if left := rig.close():
        print(f"left behind: {left}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.ranks.matrix", description="faults of single ranks")
    parser.add_argument("--cells", nargs="+", default=["*"], help="fault:part:rank:phase:backend, * is a wildcard")
    parser.add_argument("--report", type=Path, default=REPORT)
    args = parser.parse_args()
    return 1 if run(args.cells, begun(args.report, "cells"), args.report) else 0


if __name__ == "__main__":
    sys.exit(main())
