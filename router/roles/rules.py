"""Whether a worker may change its role, and how far it is. Pure: reads the table and its workers."""

from enum import StrEnum

from router.pool.states import Check, Health
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable


class SwitchProgress(StrEnum):
    UNDER_WAY = "under way"
    THERE = "it serves in the new role"
    WENT_BACK = "it started again in its old role"
    ENDED = "it has ended"
    REMOVED = "it was taken out of the table"


def objection(table: WorkerTable, worker: Worker, role: Role, *, force: bool = False) -> str:
    """Why `worker` may not become a `role` worker; "": it may. `force`: though the pool that it leaves is empty then.

    A pool is a model's: an adapter that only this worker has counts as one.
    """
    if Role.UNIFIED in (worker.role, role):
        return "only prefill and decode workers change their role"
    if worker not in table.workers():
        return "it is not in the table"
    if worker.switching_to is not None:
        return f"it is becoming a {worker.switching_to} worker already"
    if worker.leaving or worker.health is not Health.UP:
        return f"it is {'leaving' if worker.leaving else worker.health}; only a healthy worker changes its role"
    alone = None if force else _served_by_it_alone(table, worker)
    if alone is None:
        return ""
    return f"it is the last healthy {worker.role} worker{alone and f' of {alone!r}'}; force the switch, or add a worker"


def _served_by_it_alone(table: WorkerTable, worker: Worker) -> str | None:
    """A model that no other worker of its role serves ("": any); None: there is none."""
    for model in worker.models or ("",):
        if all(other is worker for other in table.pool(worker.role, model)):
            return model
    return None


def progress(table: WorkerTable, worker: Worker, role: Role, *, was: str) -> SwitchProgress:
    """Of a worker that was asked to become a `role` worker. `was`: its incarnation before."""
    if worker not in table.workers():
        return SwitchProgress.REMOVED
    if worker.health is Health.DOWN and worker.last_check is Check.REFUSED:  # one that changes keeps its port
        return SwitchProgress.ENDED
    if worker.health is not Health.UP:
        return SwitchProgress.UNDER_WAY
    if worker.role is role:
        return SwitchProgress.THERE
    role_is_read = worker.good_s >= worker.incarnation_s  # by the check that saw this life first
    if worker.incarnation not in ("", was) and role_is_read:
        return SwitchProgress.WENT_BACK
    return SwitchProgress.UNDER_WAY
