"""`make rank-faults`: every rank of a worker is killed or stopped in every phase; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.matrix [--cells 'kill:prefill:*'] [--report FILE]

The worker ends with all its processes and says which rank failed; every request is right or an error; the other worker's memory is
back, and no page that the dead rank may still write is used again before all ranks are proved dead; then all serves again.
"""

import asyncio
import contextlib
import fnmatch
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import groupby

import psutil

from tools.family import lives
from tools.faults.household import unclean, until
from tools.faults.lane import on_one_cluster
from tools.faults.load import Load
from tools.faults.ranks.rig import LEADER, WATCHDOG_S, RankCell, RankFault, RankPhase, RankRig, rank_cells
from tools.faults.report import Rows, rank_parser
from tools.faults.rig import WORKERS
from tools.faults.run_cell import BOUND_S, LONG, NUM_REQUESTS, SHORT, Ended, until_serves

WITHIN_S = 60.0
ORPHAN_S = 5.0  # for which pages must stay where a living follower may write them
CLOSELY_S = 0.002
OF_A_FOLLOWER = "disagg/processes/rank_process.py"  # a file in the stack of its main thread


@dataclass
class RankResult(Ended):
    """`ended_s`: seconds from the fault until all processes of the worker are gone. `said`: its line that names the rank."""

    said: str = ""
    ended_s: float = 0.0


async def run_rank_cell(rig: RankRig, cell: RankCell, *, seed: int) -> RankResult:
    """`rig` is whole before and, if nothing failed, after."""
    result = RankResult(cell.name)
    await result.of(_run(rig, cell, result, seed=seed))
    return result


async def _run(rig: RankRig, cell: RankCell, result: RankResult, *, seed: int) -> None:
    if cell.phase is RankPhase.LOAD or cell.fault is RankFault.ORPHAN:
        await _start_again(rig, cell, seed)
    async with _in_phase(rig, cell, seed) as load:
        log_size, at_s = len(rig.log(cell.part)), time.monotonic()
        family = _hit(rig, cell)
        if cell.fault is RankFault.STOP and cell.phase is RankPhase.IDLE:
            load = Load(rig.router, count=NUM_REQUESTS, new_tokens=SHORT, seed=seed)
        if cell.fault in (RankFault.STOP, RankFault.HANG) and load is not None:
            load.add(seed + 1)  # a step that hangs
        if cell.fault in (RankFault.KILL, RankFault.HANG):
            await _until_gone(family)
            rig.switch(steps_of(cell.part), None)
    if cell.fault is RankFault.ORPHAN:
        await _orphan(rig, family, result)
    await _until_gone(family)
    result.ended_s = time.monotonic() - at_s
    result.said = _said(rig.log(cell.part)[log_size:], cell, result)
    if load is not None:
        result.note(await load.outcomes(BOUND_S), at_s, lambda number: ("right", "error"))
    result.problems += await unclean([rig.parts[name] for name in WORKERS if name != cell.part])
    result.settled_s = time.monotonic() - at_s
    rig.begin(cell.part)
    await until(rig.parts[cell.part].is_ready, WITHIN_S, f"{cell.part} is back")
    await until_serves(rig, seed=seed)
    result.problems += await unclean([rig.parts[name] for name in WORKERS])
    result.problems += [f"left behind: {what}" for what in rig.household.left_behind()]


async def _start_again(rig: RankRig, cell: RankCell, seed: int) -> None:
    """To meet the victim while it loads, or with a follower that can outlive it."""
    rig.parts[cell.part].process.terminate()
    await until(lambda: not rig.parts[cell.part].alive, WITHIN_S, f"{cell.part} has ended")
    if cell.fault is not RankFault.ORPHAN:
        rig.begin(cell.part)
        return
    rig.switch("orphans", "")
    rig.begin(cell.part)
    await until(rig.parts[cell.part].is_ready, WITHIN_S, f"{cell.part} is ready")
    rig.switch("orphans", None)
    await until_serves(rig, seed=seed)


@contextlib.asynccontextmanager
async def _in_phase(rig: RankRig, cell: RankCell, seed: int) -> AsyncIterator[Load | None]:
    """The cluster in the phase, and what is asked meanwhile."""
    held = {RankPhase.FORWARD: steps_of(cell.part), RankPhase.TRANSFER: "hold"}.get(cell.phase)
    if held is not None:
        rig.switch(held, "")
    try:
        load = None
        if cell.phase in (RankPhase.FORWARD, RankPhase.TRANSFER, RankPhase.DECODE):
            new = LONG if cell.phase is RankPhase.DECODE else SHORT
            load = Load(rig.router, count=NUM_REQUESTS, new_tokens=new, seed=seed)
        await until(lambda: _is_there(rig, cell), WITHIN_S, f"the phase {cell.phase}")
        yield load
    finally:
        if held is not None:
            rig.switch(held, None)


def steps_of(part: str) -> str:
    """The switch that holds the steps of a worker's follower."""
    return f"{part}-rank-steps"


def _is_there(rig: RankRig, cell: RankCell) -> bool:
    match cell.phase:
        case RankPhase.LOAD:
            return rig.rank(cell.part, "follower") is not None
        case RankPhase.IDLE:
            return True
        case RankPhase.FORWARD:
            return rig.is_in_a_step(cell.part)
        case RankPhase.TRANSFER:
            return rig.state("prefill")["queues"]["inflight"] == NUM_REQUESTS  # type: ignore[no-any-return]
        case RankPhase.DECODE:
            return rig.state("decode")["running"] == NUM_REQUESTS  # type: ignore[no-any-return]


def _hit(rig: RankRig, cell: RankCell) -> list[psutil.Process]:
    """Do it; return all processes of the worker."""
    rig.household.note_segments()
    victim, family = rig.rank(cell.part, cell.rank), rig.parts[cell.part].tree()
    assert victim is not None, f"no {cell.rank} of {cell.part}"
    match cell.fault:
        case RankFault.KILL:
            victim.kill()
        case RankFault.STOP:
            victim.suspend()
        case RankFault.HANG:
            rig.switch(steps_of(cell.part), "")
        case RankFault.ORPHAN:
            follower = rig.rank(cell.part, "follower")
            assert follower is not None
            follower.suspend()
            victim.kill()
    return family


async def _until_gone(family: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + WITHIN_S + WATCHDOG_S
    while living := [p for p in family if lives(p)]:
        assert time.monotonic() < deadline_s, f"outlive a rank of theirs: {living}"
        await asyncio.sleep(CLOSELY_S)


async def _orphan(rig: RankRig, family: list[psutil.Process], result: RankResult) -> None:
    """All but the stopped follower end; while it lives, pages that it may write are not used again."""
    orphan = next(p for p in family if lives(p) and "disagg.processes.rank_process" in p.cmdline())
    await _until_gone([p for p in family if p.pid != orphan.pid])
    await until(lambda: rig.state("decode")["pages"]["quarantined"] > 0, WITHIN_S, "decode keeps the pages")
    kept_s = time.monotonic()
    while time.monotonic() - kept_s < ORPHAN_S:
        if not rig.state("decode")["pages"]["quarantined"]:
            result.problems.append("decode gave pages back that the living follower may write")
            break
        await asyncio.sleep(0.1)
    orphan.kill()


def _said(text: str, cell: RankCell, result: RankResult) -> str:
    """The one line that names the rank."""
    if cell.fault in (RankFault.STOP, RankFault.HANG):
        wanted = ("--watchdog-timeout", "rank 1 of 2 (pid ")
    else:
        wanted = ("the scheduler process ended (status -9)" if cell.rank == LEADER else "ended: SIGKILL",)
    lines = [line for line in text.splitlines() if all(part in line for part in wanted)]
    errors = [line for line in text.splitlines() if line.startswith("tandem serve: error: ")]
    if not lines or len(errors) > 1:
        result.problems.append(f"says {errors} and {lines}, wanted one line with {wanted}")
    if cell.fault is RankFault.HANG and OF_A_FOLLOWER not in text:
        result.problems.append("no stack of the rank that hangs")
    return lines[0] if lines else ""


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
