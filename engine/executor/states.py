"""Recurrent states in a step: initial states, slots, checkpoints, and rollback of drafts.

    step with drafts   checkpoints a state, then passes all rows of its request; layers keep
                       their products
    a later one        rolls back rejected drafts: restores the checkpoint, passes accepted rows

Accepted drafts cost only the copy. A row's output does not depend on later rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.plan import Plan, PlanItem, SlotOpen, StateCopy, StateRollback
from engine.executor.step_part import Batch, StepPart, StepRows, first_rows, runs_of
from engine.kv.state_pool import StatePool, StateTable
from engine.kv.step_batch import upload
from engine.models.decoder import DenseDecoder


@dataclass(frozen=True, slots=True)
class _Verified:
    """Rows from `first` on of a step with drafts: a request's, behind its first `start` tokens.

    `slot`: of its state; `shadow`: what this was then.
    """

    first: int
    start: int
    slot: int
    shadow: int


class States(StepPart):
    def __init__(self, pool: StatePool, *, num_rows: int) -> None:
        self.pool = pool
        self._table = StateTable(num_rows=num_rows, device=pool.device)
        self._slots: dict[int, int] = {}  # the same on the host
        self._verified: dict[int, _Verified] = {}  # of the last step with drafts, by row of the request table

    def attach(self, model: DenseDecoder) -> None:
        model.use_states(self.pool)

    def open(self, opened: SlotOpen) -> None:
        self._table.open(opened.slot, opened.state)
        self._slots[opened.slot] = opened.state

    def prepare(self, model: DenseDecoder, plan: Plan) -> None:
        self.pool.run(plan.states)

    def fill(self, rows: StepRows) -> None:
        rows.step.state_slots = self._table.rows[rows.step.slots]

    def begin(self, batch: Batch) -> None:
        step = batch.rows.step
        self.pool.step = step
        if step.drafts:
            self._note_runs(batch.items)
            self.pool.run([StateCopy(run.slot, run.shadow) for run in self._verified.values()])

    def _note_runs(self, items: Sequence[PlanItem]) -> None:
        starts, drafted = first_rows(items), [run[0] for run in runs_of(items) if len(run) > 1]
        self._verified = {
            row: _Verified(starts[i], items[i].start, self._slots[row], self.pool.shadow(number))
            for number, (i, row) in enumerate((i, items[i].slot) for i in drafted)
        }

    def end(self, batch: Batch, hidden: Tensor) -> None:
        self.pool.run(batch.plan.snapshots)

    def rewind(self, model: DenseDecoder, rewinds: Sequence[StateRollback]) -> None:
        runs = [self._verified[rewind.slot] for rewind in rewinds]
        self.pool.run([StateCopy(run.shadow, run.slot) for run in runs])
        counts = [rewind.length - run.start for rewind, run in zip(rewinds, runs, strict=True)]
        rows = [row for run, count in zip(runs, counts, strict=True) for row in range(run.first, run.first + count)]
        slots = torch.tensor([run.slot for run in runs], dtype=torch.int32)
        model.pass_again(self._upload(torch.tensor(rows)), counts, self._upload(slots))

    def _upload(self, values: Tensor) -> Tensor:
        return upload(values, self.pool.device)
