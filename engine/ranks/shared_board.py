"""Board of DP attention in shared memory: posted steps, prompt gate, votes on weights.

Each number has one writer; rows are written before their count.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple

import torch

from engine.core.dp_agreement import PromptGate
from engine.core.dp_step import DECIDES, Row
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import BOARD_ROWS, ROW_NUMBERS

_KINDS = {name: type(value) for name, value in asdict(Row(step=0, idle=True)).items()}  # int, bool or float
assert len(_KINDS) <= ROW_NUMBERS


class SharedBoard:
    """`Board` and `VoteBoard` of a DP rank; `wakes` wake other ranks' loops."""

    def __init__(self, region: SharedRegion, *, rank: int, wakes: Mapping[int, Callable[[], None]]) -> None:
        plan = region.plan
        self.num_ranks = plan.dp_ranks
        self._region = region
        self._rank = rank
        self._wakes = [wake for other, wake in wakes.items() if other != rank]
        self._gate = region.word(plan.gate)
        lines = [region.tensor(plan.board_lines(other), (2, 8), torch.int64)[:, :1] for other in range(self.num_ranks)]
        self._posted, self._votes = [line[0] for line in lines], [line[1] for line in lines]
        self._rows = region.tensor(plan.board_rows, (self.num_ranks, BOARD_ROWS, ROW_NUMBERS), torch.float64)

    def post(self, rank: int, row: Row) -> None:
        last = self.last_step(rank)
        assert rank == self._rank and row.step == last + 1, (rank, row, last)
        numbers = torch.tensor(astuple(row), dtype=torch.float64)
        self._rows[rank, row.step % BOARD_ROWS, : len(numbers)] = numbers
        self._region.publish(self._posted[rank], row.step + 1)
        self._wake()

    def row(self, rank: int, step: int) -> Row | None:
        if self.last_step(rank) < step:
            return None
        numbers = self._rows[rank, step % BOARD_ROWS].tolist()
        row = Row(**{name: kind(number) for (name, kind), number in zip(_KINDS.items(), numbers, strict=False)})
        assert row.step == step, f"row {step} of DP rank {rank} is overwritten by row {row.step}"
        return row

    def last_step(self, rank: int) -> int:
        return self._region.read(self._posted[rank]) - 1

    def gate(self) -> PromptGate:
        since_step, closed = divmod(self._region.read(self._gate), 2)
        return PromptGate(not closed, since_step)

    def set_gate(self, gate: PromptGate) -> None:
        assert self._rank == DECIDES
        self._region.publish(self._gate, 2 * gate.since_step + (not gate.opens))

    def vote(self, rank: int, number: int) -> None:
        assert rank == self._rank
        self._region.publish(self._votes[rank], number)
        self._wake()

    def voted(self, rank: int) -> int:
        return self._region.read(self._votes[rank])

    def _wake(self) -> None:
        for wake in self._wakes:
            wake()
