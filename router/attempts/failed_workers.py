"""The workers that failed one request, and those to try next. Pure.

Other workers come first; after a failed join other bootstrap servers, each with `MAX_JOINS`
attempts. A failure that the request may have caused is tried once elsewhere: an answer blames the
first workers, another failure the request.
"""

from collections.abc import Iterable, Sequence

import msgspec

from router.attempts.upstream_call import CallFailed
from router.pool.worker import Pool, Role, Worker

MAX_JOINS = 2

Server = tuple[str, int | None]


def server_of(worker: Worker) -> Server | None:
    return (worker.bootstrap_host, worker.bootstrap_port) if worker.role is Role.PREFILL else None


class FailedWorkers(msgspec.Struct):
    """Failures of one request: dead workers, errors of live ones, and `num_own` of these that the
    request may have caused.
    """

    last: CallFailed
    num_deaths: int = 0
    num_errors: int = 0
    num_own: int = 0
    _suspects: dict[int, Worker] = msgspec.field(default_factory=dict)
    _failed: set[int] = msgspec.field(default_factory=set)
    _unjoined: dict[Server, int] = msgspec.field(default_factory=dict)

    def note(self, failure: CallFailed, workers: Sequence[Worker]) -> None:
        self.last = failure
        self.num_deaths += failure.is_death
        self.num_errors += failure.reason == "status" and not failure.is_death and not failure.draining
        self._failed.add(failure.worker.worker_id)
        if failure.is_own:
            self.num_own += 1
            self._suspects |= {w.worker_id: w for w in workers}
        if failure.is_own or failure.unjoined:
            self._failed.update(w.worker_id for w in workers)
        if failure.unjoined:
            for server in filter(None, map(server_of, workers)):
                self._unjoined[server] = self._unjoined.get(server, 0) + 1

    def has_failed(self, worker: Worker) -> bool:
        return worker.worker_id in self._failed

    @property
    def is_own(self) -> bool:
        """True if different workers failed alike."""
        return self.num_own > 1

    def decides_nothing(self, workers: Iterable[Worker]) -> bool:
        """Return whether all `workers` had the last failure, so that retrying proves nothing."""
        return self.last.is_own and all(w.worker_id in self._suspects for w in workers)

    def take_suspects(self, answering: Iterable[Worker]) -> list[Worker]:
        """Return, once, the workers to blame, as `answering` succeeded."""
        suspects, self._suspects = self._suspects, {}
        for worker in answering:
            suspects.pop(worker.worker_id, None)
        return list(suspects.values())

    def best_of(self, alive: Pool) -> Pool:
        if not self._unjoined:
            return [w for w in alive if w.worker_id not in self._failed] or alive
        left = [w for w in alive if self._num_unjoined(w) < MAX_JOINS]
        fresh = [w for w in left if w.worker_id not in self._failed]
        return [w for w in fresh if not self._num_unjoined(w)] or fresh or left

    def _num_unjoined(self, worker: Worker) -> int:
        server = server_of(worker)
        return 0 if server is None else self._unjoined.get(server, 0)
