"""Run by test_process_groups.py: two DP ranks of two ranks each, forked from this process, which has imported torch.

Each rank brings rows and writes the bytes of its sums to a file, as often as the table has rows. Then the last one dies in a step, and the
others wait for its rows.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.build import RanksEnded
from engine.parallel.layout import Place
from engine.parallel.process_groups import NcclCollectives, joined
from engine.parallel.row_exchange import GroupRows
from tests.parallel.group_process import JOIN_S, forked

TP, DP, HIDDEN, WIDTH = 2, 2, 24, 41  # odd: ranks add pieces of unlike lengths
STEPS = ((3, 3), (0, 5), (4, 1), (1, 1))  # rows of each DP rank


def rows_of(dp_rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + dp_rank)
    return torch.randn((STEPS[step][dp_rank], HIDDEN), generator=draw)


def partial_of(rank: int) -> Callable[[Tensor], Tensor]:
    """Of very different sizes by rank: the sum depends on the order."""
    matrix = torch.randn((HIDDEN, WIDTH), generator=torch.Generator().manual_seed(rank)) * 3.0**rank
    return lambda rows: torch.cat([row.unsqueeze(0) @ matrix for row in rows] or [torch.empty(0, WIDTH)])


def main() -> None:
    sys.exit(forked(TP * DP, run) != [0, 0, 0, -signal.SIGKILL])


def run(store: int, rank: int, file: Path) -> None:
    """One rank."""
    place = Place(tp_rank=rank % TP, tp_size=TP, dp_rank=rank // TP, dp_size=DP)
    groups = joined(store, place, torch.device("cpu"), timeout_s=JOIN_S, backend="gloo")
    assert groups.joint is not None and groups.stage is not None
    exchange = GroupRows(groups.joint, stage=NcclCollectives(groups.stage, memory=None), place=place)
    with file.open("wb") as found:
        for step, tokens in enumerate(STEPS):
            exchange.begin(tokens)
            own = exchange.compute(rows_of(place.dp_rank, step), partial_of(rank))
            found.write(own.view(torch.uint8).numpy().tobytes())
    if rank == TP * DP - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            exchange.begin_equal(2)
            exchange.compute(torch.zeros((1, HIDDEN)), partial_of(rank))
    except RanksEnded:
        return


if __name__ == "__main__":
    main()
