"""Whether a worker may change its role, and how far the change is. Pure."""

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
    """Why `worker` may not become a `role` worker; "": it may. `force`: even if that empties the pool of a model or adapter."""
    if Role.UNIFIED in (worker.role, role):
        return "only prefill and decode workers change their role"
    if worker not in table.workers():
        return "it is not in the table"
    if worker.switching_to is not None:
        return f"it is becoming a {worker.switching_to} worker already"
    if worker.leaving or worker.health is not Health.UP:
        return f"it is {'leaving' if worker.leaving else worker.health}; only a healthy worker changes its role"
    for model in () if force else worker.models or ("",):
        if all(other is worker for other in table.pool(worker.role, model)):
            which = f"the last healthy {worker.role} worker{model and f' of {model!r}'}"
            return f"it is {which}; force the switch, or add a worker"
    return ""


def progress(table: WorkerTable, worker: Worker, role: Role, *, was: str) -> SwitchProgress:
    """Return how far a worker is on its way to `role`. `was`: its incarnation before the change."""
    if worker not in table.workers():
        return SwitchProgress.REMOVED
    if (
        worker.health is Health.DOWN and worker.last_check is Check.REFUSED
    ):  # a worker that changes its role keeps its port
        return SwitchProgress.ENDED
    if worker.health is not Health.UP:
        return SwitchProgress.UNDER_WAY
    if worker.role is role:
        return SwitchProgress.THERE
    role_is_read = worker.good_s >= worker.incarnation_s  # by the check that saw this incarnation first
    if worker.incarnation not in ("", was) and role_is_read:
        return SwitchProgress.WENT_BACK
    return SwitchProgress.UNDER_WAY
