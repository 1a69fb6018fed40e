"""`make fault-matrix`: runs the cells that have no result yet, with a progress bar, and writes docs/reports/reliability.md.

usage: python -m tools.faults.matrix [--jobs 2] [--again] [--results DIR] [CELL...]

CELL: fault:victim:phase:backend with wildcards, `kill:prefill:*`, say; default: all. A run that was broken off goes on where it
was; --again runs the chosen cells anew. docs/reports/fault_matrix.json and the page are written when every cell of the matrix has a result.
Exit status: 0 when all chosen cells passed.
"""

import argparse
import json
import sys
import time
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from tools.faults.cells import Cell, chosen
from tools.faults.lane import group_of, path_of, run_lane
from tools.faults.report import MATRIX, REPORTS, RESULTS, about_run, keep, write_page
from tools.progress import progress

LANE_CELLS = 12
POLL_S = 0.2


def lanes(cells: list[Cell]) -> list[list[Cell]]:
    """In each: cells of one kind of cluster, few enough that lanes end about together."""
    ordered = sorted(cells, key=group_of)
    groups = [list(group) for _, group in groupby(ordered, key=group_of)]
    return [group[i : i + LANE_CELLS] for group in groups for i in range(0, len(group), LANE_CELLS)]


def run(cells: list[Cell], *, results: Path, jobs: int) -> None:
    spawn = get_context("spawn")
    waiting, running = lanes(cells), list[SpawnProcess]()
    with progress(len(cells), unit="cell") as bar:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(spawn.Process(target=run_lane, args=(waiting.pop(0), results)))
                    running[-1].start()
                time.sleep(POLL_S)
                running = [lane for lane in running if lane.is_alive()]
                done = [cell for cell in cells if path_of(results, cell).exists()]
                bar.update(len(done) - bar.n)
                if done:
                    bad = [cell.name for cell in done if not _read(results, cell)["ok"]]
                    bar.set_postfix_str(f"{len(bad)} failed", refresh=False)
                bar.update(0)  # it draws when it is time to
        finally:
            for lane in running:
                lane.terminate()
                lane.join()


def _read(results: Path, cell: Cell) -> dict[str, object]:
    return json.loads(path_of(results, cell).read_text())  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--jobs", type=int, default=2, help="clusters at a time (default: 2)")
    parser.add_argument("--again", action="store_true", help="run the chosen cells again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    cells = chosen(args.cells)
    if not cells:
        parser.error(f"no cell is called {' '.join(args.cells)}; fault:victim:phase:backend, * is a wildcard")
    args.results.mkdir(parents=True, exist_ok=True)
    for cell in cells if args.again else []:
        path_of(args.results, cell).unlink(missing_ok=True)
    missing = [cell for cell in cells if not path_of(args.results, cell).exists()]
    about = _about(args.results, is_new=len(missing) == len(chosen([])))
    if missing:
        run(missing, results=args.results, jobs=args.jobs)
    if all(path_of(args.results, cell).exists() for cell in chosen([])):
        keep(REPORTS / MATRIX, {"about": about, "cells": {cell.name: _read(args.results, cell) for cell in chosen([])}})
        write_page()
    return _summary(cells, args.results)


def _about(results: Path, *, is_new: bool) -> dict[str, Any]:
    """How the matrix is run; of its first part, if it was broken off and goes on."""
    path = results / "about.json"
    if is_new or not path.exists():
        path.write_text(json.dumps(about_run()))
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def _summary(cells: list[Cell], results: Path) -> int:
    ended = [cell for cell in cells if path_of(results, cell).exists()]
    bad = [cell for cell in ended if not _read(results, cell)["ok"]]
    for cell in bad:
        print(f"FAILED {cell.name}: {_read(results, cell)['problems']}")
    print(f"{len(ended) - len(bad)} of {len(cells)} cells passed; results in {results}")
    return 0 if len(ended) == len(cells) and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
