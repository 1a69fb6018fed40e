"""Runs cells one after the other on one cluster, in a process that the matrix starts: a JSON file a cell."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from deploy.bench.environment import commit
from tools.faults.cells import SILENCE_S, Cell, Layout, Size, layout_of
from tools.faults.rig import Rig
from tools.faults.rig_on_links import RigOnLinks
from tools.faults.rig_on_machines import RigOnMachines
from tools.faults.run_cell import Ended, Result, run_cell

AnyRig = TypeVar("AnyRig", bound=Rig)
AnyCell = TypeVar("AnyCell")
AnyResult = TypeVar("AnyResult", bound=Ended)
RIGS = {Layout.PLAIN: Rig, Layout.LINKS: RigOnLinks, Layout.MACHINES: RigOnMachines}


def run_lane(cells: list[Cell], results: Path) -> None:
    """`cells` need the same kind of cluster (`group_of`). What is printed goes to a log beside the results."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cluster is ended, its machines are taken down
    with (results / "lanes.log").open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    load = os.getloadavg()[0]

    def play(rig: Rig, cell: Cell) -> Result:
        result = asyncio.run(run_cell(rig, cell, seed=1000 * sum(cell.name.encode())))
        hold_to_bounds(cell, result)
        return result

    for cell, result, rig in on_one_cluster(cells, lambda cell: RIGS[layout_of(cell)](cell.backend, cell.size), play):
        if not result.ok and rig is not None:
            _keep_logs(rig, results, cell)
        _write(results, cell, result, load)
        load = os.getloadavg()[0]


def on_one_cluster(
    cells: Iterable[AnyCell], make: Callable[[AnyCell], AnyRig], play: Callable[[AnyRig, AnyCell], AnyResult]
) -> Iterator[tuple[AnyCell, AnyResult, AnyRig | None]]:
    """Play `cells`; yield each and what it came to, with the cluster that still runs.

    After one that failed the cluster is a new one, so that no failure causes another. What is left behind at the end is a failure of
    the last: it is yielded again, without a cluster.
    """
    rig: AnyRig | None = None
    try:
        for cell in cells:
            if rig is None:
                rig = make(cell)
                rig.start_all()
            result = play(rig, cell)
            yield cell, result, rig
            if not result.ok:
                rig.close()
                rig = None
    except BaseException:
        if rig is not None:
            rig.close()
        raise
    if rig is not None and (left := rig.close()):
        result.ok, result.problems = False, [f"left behind at the end: {what}" for what in left]
        yield cell, result, None


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


def _write(results: Path, cell: Cell, result: Result, load: float) -> None:
    path = path_of(results, cell)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**result.to_json(), "load": round(load, 1), "at": time.time(), "commit": commit()}))
    partial.replace(path)


def _keep_logs(rig: Rig, results: Path, cell: Cell) -> None:
    for part in rig.parts.values():
        (results / f"{cell.name.replace(':', '.')}.{part.name}.log").write_bytes(part.log_tail())
