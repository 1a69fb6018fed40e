"""Recurrent states in a step: what requests begin from, where each one's state lies, and copies of what the step leaves."""

from torch import Tensor

from engine.core.plan import Plan, SlotOpen
from engine.kv.state_pool import StatePool, StateTable
from engine.kv.step_batch import StepBatch
from engine.models.decoder import DenseDecoder


class States:
    def __init__(self, pool: StatePool, *, num_rows: int) -> None:
        self.pool = pool
        self._table = StateTable(num_rows=num_rows, device=pool.device)

    def attach(self, model: DenseDecoder) -> None:
        model.use_states(self.pool)

    def open(self, opened: SlotOpen) -> None:
        self._table.open(opened.slot, opened.state)

    def of(self, slots: Tensor) -> Tensor:
        """Return the state slots [B] int32 of the requests in rows `slots` [B] int64."""
        return self._table.rows[slots]

    def begin(self, plan: Plan, step: StepBatch) -> None:
        self.pool.run(plan.states)
        self.pool.step = step

    def end(self, plan: Plan) -> None:
        self.pool.run(plan.snapshots)
