"""What one request has tried already, and so whom to try next. Pure.

A worker that failed it is tried again only where there is no other. A pair that could not be joined may owe that to either
side, or to the bootstrap server between them: decode has asked there again and again before it said so, so others come
first, and one server gets `MAX_JOINS` tries in all.
"""

from collections.abc import Sequence

import msgspec

from router.pool.worker import Role, Worker
from router.requests.legs import LegError

MAX_JOINS = 2

Server = tuple[str, int | None]


class Attempts(msgspec.Struct):
    """The failed attempts of one request; `last`: the latest failure."""

    last: LegError | None = None
    _failed: set[int] = msgspec.field(default_factory=set)
    _unjoined: dict[Server, int] = msgspec.field(default_factory=dict)

    def note(self, failure: LegError, workers: Sequence[Worker]) -> None:
        """`failure` ended the attempt on `workers`. Only the leg that failed is blamed, if it can be told which."""
        self.last = failure
        self._failed.add(failure.worker.worker_id)
        if failure.unjoined:
            self._failed.update(w.worker_id for w in workers)
            for server in filter(None, map(_server_of, workers)):
                self._unjoined[server] = self._unjoined.get(server, 0) + 1

    def candidates(self, alive: Sequence[Worker]) -> Sequence[Worker]:
        """Those of `alive`, all of one role, that are best tried next; none: it would be in vain."""
        if self.last is None:  # nearly every request has no other attempt
            return alive
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
