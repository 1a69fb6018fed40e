"""A cheap, fixed part of the fault matrix (all of it: `make fault-matrix`), one cluster for all cells."""

import asyncio
from collections.abc import Iterator

import pytest

from tools.faults.cells import Cell, Fault, Phase, Victim
from tools.faults.rig import Rig
from tools.faults.run_cell import run_cell

FAULT_S = 1.0
CELLS = [
    Cell(Fault.ERROR, Victim.PREFILL, Phase.TRANSFERRING),
    Cell(Fault.STOP, Victim.DECODE, Phase.TRANSFERRING),
    Cell(Fault.STOP, Victim.BOOTSTRAP, Phase.BOOTSTRAPPING),
    Cell(Fault.KILL, Victim.ROUTER, Phase.BOOTSTRAPPING),
    Cell(Fault.RESTART, Victim.PREFILL, Phase.TRANSFERRING),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig("nixl")
    try:
        rig.start_all()
        yield rig
    finally:
        left = rig.close()
    assert left == []


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(rig: Rig, cell: Cell) -> None:
    result = asyncio.run(run_cell(rig, cell, seed=1, fault_s=FAULT_S))
    assert result.problems == []
