"""The pools of a table: which workers may be chosen for a role and a model, kept from request to request. Pure.

    tier    regular, heard    it is up, and neither leaves nor changes its role
            regular, silent   the same, but it answers no probe
            last, heard       it leaves, and serves while no regular worker of its role is up, of any model
            last, silent

The first tier that has workers is the pool. A pool reads from a log which workers have changed, and moves them between its tiers: a
change costs the same at any number of workers, once for each pool in use.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router.pool.models import serves
from router.pool.pool import WorkerPool
from router.pool.states import Health
from router.pool.worker import LoadLog, Role, Worker

MAX_POOLS = 256  # of one table; the least recently used is given up

_NUM_TIERS = 4


def is_up(worker: Worker) -> bool:
    """Whether it may be chosen, as a regular worker or as a last resort."""
    if worker.health is not Health.UP or worker.switching_to is not None:
        return False
    return not worker.leaving or worker.last_resort


class _Tiers:
    """The pools of one role and model."""

    def __init__(self, role: Role, model: str, *, place: int) -> None:
        self.role, self.model = role, model
        self.read = place  # of the log of changes
        self.pools: tuple[WorkerPool, ...] = ()
        self._tier_of: dict[int, int] = {}

    def begin(self, workers: Iterable[Worker], loads: LoadLog) -> None:
        found: list[list[Worker]] = [[] for _ in range(_NUM_TIERS)]
        self._tier_of.clear()
        for worker in workers:
            if (tier := self._tier(worker)) is not None:
                found[tier].append(worker)
                self._tier_of[worker.worker_id] = tier
        self.pools = tuple(WorkerPool(tier, loads) for tier in found)

    def place(self, worker: Worker, *, there: bool) -> None:
        """Move a worker that has changed. `there`: it is in the table."""
        old, new = self._tier_of.get(worker.worker_id), self._tier(worker) if there else None
        if old == new:
            return
        if old is not None:
            self.pools[old].leave(worker)
            del self._tier_of[worker.worker_id]
        if new is not None:
            self.pools[new].join(worker)
            self._tier_of[worker.worker_id] = new

    def pool(self, *, has_regular: bool) -> WorkerPool:
        heard, silent = self.pools[:2] if has_regular else self.pools[2:]
        return heard or silent

    def _tier(self, worker: Worker) -> int | None:
        if worker.role is not self.role or not is_up(worker):
            return None
        if self.model and not serves(worker.models, self.model):
            return None
        return 2 * worker.leaving + worker.silent


@dataclass(slots=True)
class Members:
    """`workers`: of the table, by id, in their order."""

    workers: Mapping[int, Worker]
    loads: LoadLog
    _changes: LoadLog = field(default_factory=LoadLog)
    _regular: dict[int, Role] = field(default_factory=dict)  # by id of the worker
    _num_regular: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    _pools: dict[tuple[Role, str], _Tiers] = field(default_factory=dict)

    def note(self, worker: Worker) -> None:
        """`worker` has come, gone, or changed in anything that decides whether it may be chosen, or where decode finds it."""
        there = worker.worker_id in self.workers
        self._count(worker, regular=there and is_up(worker) and not worker.leaving)
        self._changes.note(worker.worker_id)
        self.loads.note(worker.worker_id)
        if not there and self._pools:
            self._forget(worker)

    def pool(self, role: Role, model: str) -> WorkerPool:
        tiers = self._pools.get((role, model))
        if tiers is None:
            tiers = self._begin(role, model)
        elif tiers.read != self._changes.end:
            self._catch_up(tiers)
        return tiers.pool(has_regular=self.has_regular(role))

    def has_regular(self, role: Role) -> bool:
        return self._num_regular[role] > 0

    def _begin(self, role: Role, model: str) -> _Tiers:
        if len(self._pools) >= MAX_POOLS:
            del self._pools[next(iter(self._pools))]
        tiers = self._pools[role, model] = _Tiers(role, model, place=self._changes.end)
        tiers.begin(self.workers.values(), self.loads)
        return tiers

    def _catch_up(self, tiers: _Tiers) -> None:
        ids, tiers.read = self._changes.since(tiers.read), self._changes.end
        if ids is None or len(ids) > len(self.workers):
            tiers.begin(self.workers.values(), self.loads)
            return
        for worker_id in dict.fromkeys(ids):
            if (worker := self.workers.get(worker_id)) is not None:
                tiers.place(worker, there=True)

    def _forget(self, worker: Worker) -> None:
        """A worker leaves every pool at once: nothing is kept of it until each pool is asked for again."""
        for tiers in self._pools.values():
            tiers.place(worker, there=False)

    def _count(self, worker: Worker, *, regular: bool) -> None:
        was = self._regular.pop(worker.worker_id, None)
        if was is not None:
            self._num_regular[was] -= 1
        if regular:
            self._regular[worker.worker_id] = worker.role
            self._num_regular[worker.role] += 1

    def check(self) -> None:
        for tiers in self._pools.values():
            self._catch_up(tiers)
            plain = _Tiers(tiers.role, tiers.model, place=0)
            plain.begin(self.workers.values(), self.loads)
            assert tiers.pools == plain.pools, (tiers.role, tiers.model)
        regular = {i: w.role for i, w in self.workers.items() if is_up(w) and not w.leaving}
        assert regular == self._regular
        assert all(list(self._regular.values()).count(role) == count for role, count in self._num_regular.items())
