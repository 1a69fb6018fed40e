"""Recurrent states in a step: initial states, slots, checkpoints, and rollback of drafts.

    step with drafts   checkpoints a state, then passes all rows of its request; layers keep
                       their products
    a later one        rolls back rejected drafts: restores the checkpoint, passes accepted rows

Accepted drafts cost only the copy. A row's output does not depend on later rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.core.plan import Plan, PlanItem, SlotOpen, StateCopy, StateRollback
from engine.executor.step_part import Batch, StepPart, StepRows, first_rows, runs_of
from engine.kv.host_pool import HostStates
from engine.kv.state_pool import StatePool
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
    def __init__(self, pool: StatePool, host: HostStates | None = None) -> None:
        self.pool = pool
        self._host = host
        self._slots: dict[int, int] = {}  # by row of the request table; padding has scratch
        self._verified: dict[int, _Verified] = {}  # of the last step with drafts, by row of the request table

    def attach(self, model: DenseDecoder) -> None:
        model.use_states(self.pool)

    def open(self, opened: SlotOpen) -> None:
        self._slots[opened.slot] = opened.state

    def prepare(self, model: DenseDecoder, plan: Plan) -> None:
        for copy in plan.states:
            if copy.from_host:
                assert self._host is not None, "a plan loads a state, and there is no host tier"
                self._host.load(self.pool.slots, copy)
            else:
                self.pool.run([copy])

    def save(self, plan: Plan) -> None:
        assert self._host is not None, "a plan copies a state, and there is no host tier"
        self._host.save(self.pool.slots, plan.states_to_host)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    def fill(self, rows: StepRows) -> None:
        rows.step.state_slots = [self._slots.get(item.slot, 0) for item in rows.items]

    def recorded_rows(self, items: Sequence[PlanItem], size: int) -> list[list[int]]:
        """`DeviceStep.state_rows`; rows of padding are apart."""
        starts = [i for i in range(size) if i >= len(items) or not items[i].draft]
        slots = [self._slots.get(items[i].slot, 0) if i < len(items) else 0 for i in starts]
        more = size - len(starts)
        return [starts + [size] * more, [*starts[1:], size] + [size] * more, slots + [0] * more]

    def begin(self, batch: Batch) -> None:
        self.pool.step = batch.rows.step
        self.checkpoint(batch.items)

    def checkpoint(self, items: Sequence[PlanItem]) -> bool:
        """Keep states before their drafts, if any."""
        if not any(item.draft for item in items):
            return False
        self._note_runs(items)
        self.pool.run([StateCopy(run.slot, run.shadow) for run in self._verified.values()])
        return True

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
        model.pass_again(upload(rows, self.pool.device), counts, [run.slot for run in runs])
