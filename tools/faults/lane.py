"""Runs cells one after the other on one cluster; `python -m tools.faults.lane --results DIR CELL...`, by the matrix.

One JSON file a cell. After a cell that failed the cluster is a new one, so that no failure causes another.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path

from deploy.bench.environment import commit
from tools.faults.cells import SILENCE_S, Cell, Layout, Size, all_cells, layout_of
from tools.faults.household import log_of
from tools.faults.rig import Rig
from tools.faults.rig_on_links import RigOnLinks
from tools.faults.rig_on_machines import RigOnMachines
from tools.faults.run_cell import Result, run_cell

RIGS = {Layout.PLAIN: Rig, Layout.LINKS: RigOnLinks, Layout.MACHINES: RigOnMachines}


def run_lane(cells: list[Cell], results: Path) -> None:
    """`cells` need the same kind of cluster (`group_of`)."""
    rig: Rig | None = None
    try:
        for cell in cells:
            if rig is None:
                rig = _started(cell)
            load_before = os.getloadavg()[0]
            result = asyncio.run(run_cell(rig, cell, seed=_seed(cell)))
            hold_to_bounds(cell, result)
            if not result.ok:
                _keep_logs(rig, results, cell)
                rig.close()
                rig = None
            _write(results, cell, result, load_before)
    finally:
        if rig is not None and (left := rig.close()):
            result.ok, result.problems = False, [f"left behind at the end: {what}" for what in left]
            _write(results, cell, result, load_before)


def hold_to_bounds(cell: Cell, result: Result) -> None:
    """A client whose answer goes on elsewhere does not wait for long. Not in `run_cell`: tests run cells on any machine."""
    if cell.size is Size.PAIRS and result.silence_s > SILENCE_S:
        result.ok = False
        result.problems.append(
            f"a stream was silent for {result.silence_s:.1f} s, {SILENCE_S:g} s at most are promised"
        )


def group_of(cell: Cell) -> tuple[str, Layout, Size]:
    """What kind of cluster a cell needs."""
    return cell.backend, layout_of(cell), cell.size


def path_of(results: Path, cell: Cell) -> Path:
    return results / f"{cell.name.replace(':', '.')}.json"


def _started(cell: Cell) -> Rig:
    rig = RIGS[layout_of(cell)](cell.backend, cell.size)
    try:
        rig.start_all()
    except BaseException:
        rig.close()
        raise
    return rig


def _seed(cell: Cell) -> int:
    return sum(cell.name.encode()) * 1000


def _write(results: Path, cell: Cell, result: Result, load: float) -> None:
    path = path_of(results, cell)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**result.to_json(), "load": round(load, 1), "at": time.time(), "commit": commit()}))
    partial.replace(path)


def _keep_logs(rig: Rig, results: Path, cell: Cell) -> None:
    for part in rig.parts.values():
        (results / f"{cell.name.replace(':', '.')}.{part.name}.log").write_bytes(log_of(part))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.lane")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("cells", nargs="+")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cluster is ended, its machines are taken down
    by_name = {cell.name: cell for cell in all_cells()}
    run_lane([by_name[name] for name in args.cells], args.results)


if __name__ == "__main__":
    main()
