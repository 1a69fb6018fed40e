"""`make rank-faults`: every rank of a worker is killed or stopped in every phase; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.matrix [--cells 'kill:prefill:*'] [--report FILE]
"""

import asyncio
import fnmatch
import sys
from itertools import groupby

from tools.faults.lane import on_one_cluster
from tools.faults.ranks.rig import RankCell, RankRig, rank_cells
from tools.faults.ranks.run import RankResult, run_rank_cell
from tools.faults.report import Rows, rank_parser


def run(patterns: list[str], rows: Rows) -> None:
    """Run cells that match, one cluster for all of a backend until one fails."""
    cells = [cell for cell in rank_cells() if any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in patterns)]
    seeds = {cell: 1000 * number for number, cell in enumerate(cells)}

    def play(rig: RankRig, cell: RankCell) -> RankResult:
        return asyncio.run(run_rank_cell(rig, cell, seed=seeds[cell]))

    for _, group in groupby(cells, key=lambda cell: cell.backend):
        for cell, result, rig in on_one_cluster(group, lambda cell: RankRig(cell.backend), play):
            rows.add(cell.name, result.to_json())
            if rig is not None and not result.ok:
                rig.household.show_logs()


def main() -> int:
    parser = rank_parser("matrix", "faults of single ranks")
    parser.add_argument("--cells", nargs="+", default=["*"], help="fault:part:rank:phase:backend, * is a wildcard")
    args = parser.parse_args()
    rows = Rows(args.report, "cells")
    run(args.cells, rows)
    return 1 if rows.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
