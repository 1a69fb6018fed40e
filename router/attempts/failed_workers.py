"""The workers that failed one request, and thus which ones to try next. Pure.

A worker that failed the request is tried again only where there is no other. When a pair could not be joined, either side may
be at fault, or the bootstrap server: other servers come first, and one server gets `MAX_JOINS` attempts in all.
"""

from collections.abc import Sequence

import msgspec

from router.attempts.upstream_call import CallFailed
from router.pool.worker import Role, Worker

MAX_JOINS = 2

Server = tuple[str, int | None]


class FailedWorkers(msgspec.Struct):
    """`num_deaths`: workers that the request may have ended; `num_errors`: failures that workers reported and lived."""

    last: CallFailed
    num_deaths: int = 0
    num_errors: int = 0
    _failed: set[int] = msgspec.field(default_factory=set)
    _unjoined: dict[Server, int] = msgspec.field(default_factory=dict)

    def note(self, failure: CallFailed, workers: Sequence[Worker]) -> None:
        """Record that `failure` ended the attempt at `workers`."""
        self.last = failure
        self.num_deaths += failure.is_death
        self.num_errors += failure.reason == "status" and not failure.is_death and not failure.draining
        self._failed.add(failure.worker.worker_id)
        if failure.unjoined:
            self._failed.update(w.worker_id for w in workers)
            for server in filter(None, map(_server_of, workers)):
                self._unjoined[server] = self._unjoined.get(server, 0) + 1

    def has_failed(self, worker: Worker) -> bool:
        return worker.worker_id in self._failed

    def best_of(self, alive: Sequence[Worker]) -> Sequence[Worker]:
        """Return those of `alive` (one role) to try next."""
        left = [w for w in alive if self._num_unjoined(w) < MAX_JOINS]
        fresh = [w for w in left if w.worker_id not in self._failed]
        elsewhere = [w for w in fresh if not self._num_unjoined(w)]
        return elsewhere or fresh or left

    def _num_unjoined(self, worker: Worker) -> int:
        server = _server_of(worker)
        return 0 if server is None else self._unjoined.get(server, 0)


def _server_of(worker: Worker) -> Server | None:
    """The bootstrap server by which decode finds a prefill worker."""
    return (worker.bootstrap_host, worker.bootstrap_port) if worker.role is Role.PREFILL else None
