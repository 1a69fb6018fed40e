"""DP attention: which step all ranks compute next, agreed by rows that each rank posts, without a call that waits for others.

    rank 0   offers plan, row 7 ----.                     .--> rows 7 complete: launch 7, offer 8 ...
    rank 1          nothing to do    `-> asked: row 7 idle -'   launch 7 without items

Step k runs if some rank offers a plan for it; then every rank posts exactly one row k, in order. When none offers one, nothing is
posted, and nothing wakes. An offered plan is in flight: an abort does not take it back.

A rank posts at most `depth` rows beyond the last step whose rows are complete, so 2 * depth + 1 rows of each rank are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.dp_step import DECIDES, AgreedStep, Row, agree
from engine.core.plan import Plan
from engine.core.prefill_gate import PrefillPolicy
from engine.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PromptGate:
    """Whether prompts may enter from step `since_step` on; before it was the opposite."""

    opens: bool = True
    since_step: int = 0


class Board(Protocol):
    """Memory that all ranks of a worker read. Each rank writes its own rows, the one that decides the gate."""

    num_ranks: int

    def post(self, rank: int, row: Row) -> None:
        """Write the next row of `rank`, and wake the other ranks' loops."""

    def row(self, rank: int, step: int) -> Row | None:
        """Return what `rank` has posted for `step`, or None."""

    def last_step(self, rank: int) -> int:
        """Return the last step that `rank` has posted a row for; -1: none."""

    def gate(self) -> PromptGate: ...

    def set_gate(self, gate: PromptGate) -> None: ...


class Agreement:
    """One rank's side. `policies`: of the rank that decides; prompts enter when all of them allow it."""

    def __init__(self, board: Board, *, rank: int, policies: Sequence[PrefillPolicy] = ()) -> None:
        assert not policies or rank == DECIDES
        self._board = board
        self._rank = rank
        self._policies = tuple(policies)
        self._next_step = 0
        self._rows: Sequence[Row] = ()  # of the last step that was agreed on

    @property
    def asked(self) -> bool:
        """Whether another rank has offered a plan for the next step."""
        rows = (self._board.row(rank, self._next_step) for rank in range(self._board.num_ranks) if rank != self._rank)
        return any(row is not None and not row.idle for row in rows)

    @property
    def admits(self) -> bool:
        """Whether prompts may enter the next step: the gate is open, or no other rank has anything that they could slow, or await."""
        gate = self._board.gate()
        opens = gate.opens == (self._next_step >= gate.since_step)
        others = (row for rank, row in enumerate(self._rows) if rank != self._rank)
        return opens or not any(row.running or row.prefillable for row in others)

    def post(self, row: Row) -> int:
        """Post the row of the next step, and return the step's number."""
        assert row.step == self._next_step
        self._board.post(self._rank, row)
        self._next_step += 1
        return row.step

    def row_of(self, plan: Plan, scheduler: Scheduler, *, prefillable: bool, delays: bool) -> Row:
        """Return the row by which this rank offers `plan`. `prefillable`: prompts waited when it was made.

        `delays`: they may not enter. Then the rank asks for a step even without items: by steps the delay ends.
        """
        allocator = scheduler.memory.allocator
        return Row(
            step=self._next_step,
            idle=not plan.items and not delays,
            tokens=sum(item.q_len for item in plan.items),
            extend=plan.extend,
            can_graph=not plan.extend,
            prefillable=prefillable,
            token_usage=(allocator.num_pages - scheduler.memory.available) / allocator.num_pages,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
        )

    def agreed(self, step: int) -> AgreedStep | None:
        """Return the step once all rows are there; None: not yet. Each step is returned once."""
        rows = [row for rank in range(self._board.num_ranks) if (row := self._board.row(rank, step)) is not None]
        if len(rows) < self._board.num_ranks:
            return None
        self._rows = rows
        if self._policies:
            self._decide(rows)
        return agree(rows)

    def _decide(self, rows: Sequence[Row]) -> None:
        """Judge a step that the gate as it is has let prompts into, or kept them from."""
        gate = self._board.gate()
        if rows[0].step < gate.since_step:
            return
        opens = all([policy.allows(rows) for policy in self._policies])  # each counts
        if opens != gate.opens:
            behind = 1 + max(self._board.last_step(rank) for rank in range(self._board.num_ranks))
            self._board.set_gate(PromptGate(opens, behind))
