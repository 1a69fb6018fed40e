"""A pool: the workers of one role that serve one model, and what policies derive from them. Pure.

The table makes a pool once and passes it to request after request, until a worker comes, goes or changes. Loads change with every
request, so the orders read them from a log.
"""

from collections.abc import Iterable
from functools import cached_property

from router.pool.load_order import LoadOrder, QueueLengths, load_key, share_key
from router.pool.ring import HashRing
from router.pool.worker import LoadLog, Role, Worker

MAX_NARROWED = 4  # narrower pools kept with each: a circuit that is tried opens and closes for some requests


class WorkerPool(list[Worker]):
    """Workers in the order of ids; never changed."""

    def __init__(self, workers: Iterable[Worker], log: LoadLog | None = None) -> None:
        super().__init__(workers)
        self._log = log or LoadLog()
        self._narrowed: dict[frozenset[int], WorkerPool] = {}

    @cached_property
    def by_id(self) -> dict[int, Worker]:
        return {worker.worker_id: worker for worker in self}

    @cached_property
    def by_tokens(self) -> LoadOrder:
        return LoadOrder(self.by_id, self._log, load_key)

    @cached_property
    def by_share(self) -> LoadOrder:
        return LoadOrder(self.by_id, self._log, share_key)

    @cached_property
    def queues(self) -> QueueLengths:
        return QueueLengths(self.by_id, self._log)

    @cached_property
    def ring(self) -> HashRing:
        return HashRing(self)

    def order_by_tokens(self) -> LoadOrder:
        self.by_tokens.catch_up()
        return self.by_tokens

    def least_loaded(self) -> Worker:
        """The least by `key_for`."""
        if self[0].role is not Role.PREFILL:
            self.by_share.catch_up()
            if self.by_share.all_known():
                return self.by_share.first()
        return self.order_by_tokens().first()

    def without(self, worker_ids: frozenset[int]) -> "WorkerPool":
        found = self._narrowed.pop(worker_ids, None)
        if found is None:
            found = WorkerPool([worker for worker in self if worker.worker_id not in worker_ids], self._log)
            if len(self._narrowed) >= MAX_NARROWED:
                del self._narrowed[next(iter(self._narrowed))]
        self._narrowed[worker_ids] = found  # the last that is used goes last
        return found
