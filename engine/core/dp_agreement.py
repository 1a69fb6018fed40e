"""DP attention: agreement on each step by posted rows, without blocking.

  rank 0   offers plan, row 7 ----.                         .--> rows 7 complete: launch 7, offer 8
  rank 1   nothing to do           `-> requested: row 7 idle -'   launch 7 without items

Step k runs if a rank offers a plan; then every rank posts one row k, in order. Without an offer
nothing wakes; aborts revoke none. A rank posts at most `depth` rows after the last complete step,
so 2 * depth + 1 rows suffice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.dp_step import DECIDES, AgreedStep, PrefillDelayer, Row, agree
from engine.core.plan import Plan
from engine.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PromptGate:
    """Permission for prompts from step `since_step`; the opposite before."""

    opens: bool = True
    since_step: int = 0


class Board(Protocol):
    """Memory shared by all ranks; each writes its rows, one the gate."""

    num_ranks: int

    def post(self, rank: int, row: Row) -> None:
        """Write the next row of `rank`, and wake the other ranks' loops."""

    def row(self, rank: int, step: int) -> Row | None:
        """The row of `step`, if posted."""

    def last_step(self, rank: int) -> int:
        """The last posted step, or -1."""

    def gate(self) -> PromptGate: ...

    def set_gate(self, gate: PromptGate) -> None: ...


class Agreement:
    """One rank's side; the deciding one may have a `delayer`."""

    def __init__(self, board: Board, *, rank: int, delayer: PrefillDelayer | None = None) -> None:
        assert delayer is None or rank == DECIDES
        self._board = board
        self._rank = rank
        self._delayer = delayer
        self._next_step = 0
        self._rows: Sequence[Row] = ()  # of the last agreed step

    @property
    def asked(self) -> bool:
        """Another rank has offered the next step."""
        rows = (self._board.row(rank, self._next_step) for rank in range(self._board.num_ranks) if rank != self._rank)
        return any(row is not None and not row.idle for row in rows)

    @property
    def admits(self) -> bool:
        """Prompts may enter: open gate, or no other rank with work that they affect."""
        gate = self._board.gate()
        opens = gate.opens == (self._next_step >= gate.since_step)
        others = (row for rank, row in enumerate(self._rows) if rank != self._rank)
        return opens or not any(row.running or row.prefillable for row in others)

    def post(self, row: Row) -> int:
        assert row.step == self._next_step
        self._board.post(self._rank, row)
        self._next_step += 1
        return row.step

    def row_of(self, plan: Plan, scheduler: Scheduler, *, prefillable: bool, delays: bool) -> Row:
        """The row for `plan`; with `delays` even an empty one, since steps end the delay."""
        return Row(
            step=self._next_step,
            idle=not plan.items and not delays,
            tokens=sum(item.q_len for item in plan.items),
            extend=plan.extend,
            can_graph=not plan.extend,
            drafts=any(item.draft for item in plan.items),
            prefillable=prefillable,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
        )

    def agreed(self, step: int) -> AgreedStep | None:
        """Return the step, once, when all rows are posted."""
        rows = [row for rank in range(self._board.num_ranks) if (row := self._board.row(rank, step)) is not None]
        if len(rows) < self._board.num_ranks:
            return None
        self._rows = rows
        if self._delayer is not None:
            self._decide(self._delayer, rows)
        return agree(rows)

    def _decide(self, delayer: PrefillDelayer, rows: Sequence[Row]) -> None:
        gate = self._board.gate()
        if rows[0].step < gate.since_step:
            return
        opens = delayer.allows(rows)
        if opens != gate.opens:
            behind = 1 + max(self._board.last_step(rank) for rank in range(self._board.num_ranks))
            self._board.set_gate(PromptGate(opens, behind))
