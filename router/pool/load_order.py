"""Workers in order of load, and their queue lengths, kept from request to request. Pure.

Load is what a role runs out of first:

    prefill, encode   tokens, of prompts or of images, that wait to be computed and are in no cache
    decode, unified   KV that requests will hold when they end, as a share of capacity where all workers report theirs

The order is a sorted list. Each reader first moves the workers whose load changed (`LoadLog`), and with peer processes the next `SWEEP`:
docs/design/routing.md.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from router.pool.worker import LoadLog, Worker

SWEEP = 16

LoadKey = tuple[float, int, int, int]


def load_key(worker: Worker) -> LoadKey:
    """Order by tokens, then by live requests, requests so far, and age."""
    return (worker.load_tokens, worker.inflight_requests, worker.assigned_total, worker.worker_id)


def share_key(worker: Worker) -> LoadKey:
    if worker.capacity_tokens <= 0:
        return (-1.0, 0, 0, worker.worker_id)
    return (worker.load_tokens / worker.capacity_tokens, *load_key(worker)[1:])


def key_for(workers: Sequence[Worker]) -> Callable[[Worker], LoadKey]:
    """The key to compare workers of one role by: shares if they hold KV and all report a capacity."""
    by_share = workers[0].role.holds_kv and all(worker.capacity_tokens > 0 for worker in workers)
    return share_key if by_share else load_key


class LogReader:
    """Reads which workers of a mapping, that others change, have changed. What a subclass keeps of each is right once it has read that.

    `also`: a second log.
    """

    def __init__(self, workers: Mapping[int, Worker], log: LoadLog, *, also: LoadLog | None = None) -> None:
        self._log = log
        self._read = log.end
        self._also = None if also is None else LogReader(workers, also)
        self._workers = workers

    def _changed(self) -> Collection[int] | None:
        """Ids of workers that may have come, gone or changed since the last call, each once; None: any may have."""
        place, self._read = self._read, self._log.end
        more: Collection[int] | None = () if self._also is None else self._also._changed()
        if place == self._read:
            return more
        ids = self._log.since(place)
        if ids is None or more is None or len(ids) > len(self._workers):
            return None
        return {*ids, *more}


class LoadOrder(LogReader):
    """`pool`: the workers of the mapping, in the order of ids."""

    def __init__(
        self,
        pool: Sequence[Worker],
        workers: Mapping[int, Worker],
        log: LoadLog,
        key: Callable[[Worker], LoadKey],
        *,
        also: LoadLog | None = None,
    ) -> None:
        super().__init__(workers, log, also=also)
        self._pool = pool
        self._key = key
        self._next = 0  # where the sweep goes on
        self._sort()

    def first(self) -> Worker:
        return self._workers[self._order[0][3]]

    def all_known(self) -> bool:
        """No worker has a load below 0 (`share_key`)."""
        return self._order[0][0] >= 0

    def walk(self) -> Iterator[Worker]:
        return (self._workers[key[3]] for key in self._order)

    def catch_up(self) -> None:
        changed = self._changed()
        if changed is None:
            self._sort()
        else:
            for worker_id in changed:
                self._place(worker_id)
        if self._log.has_peers:
            self._sweep()

    def _sweep(self) -> None:
        count = len(self._pool)
        for _ in range(min(SWEEP, count)):
            self._next = self._next + 1 if self._next + 1 < count else 0
            self._place(self._pool[self._next].worker_id)
        for _ in range(count):
            if not self._place(self._order[0][3]):
                return

    def _place(self, worker_id: int) -> bool:
        """Move a worker to its place; False: it is there."""
        worker, old = self._workers.get(worker_id), self._keys.get(worker_id)
        new = None if worker is None else self._key(worker)
        if old == new:
            return False
        if old is not None:
            del self._order[bisect_left(self._order, old)]
        if new is not None:
            insort(self._order, new)
            self._keys[worker_id] = new
        else:
            del self._keys[worker_id]
        return True

    def _sort(self) -> None:
        self._keys = {worker_id: self._key(worker) for worker_id, worker in self._workers.items()}
        self._order = sorted(self._keys.values())

    def check(self) -> None:
        assert self._order == sorted(self._keys.values())
        assert self._keys.keys() == self._workers.keys()
        assert all(key[3] == worker_id for worker_id, key in self._keys.items())


class QueueLengths(LogReader):
    """The number of workers by their number of this router's requests."""

    def __init__(self, workers: Mapping[int, Worker], log: LoadLog) -> None:
        super().__init__(workers, log)
        self._count()

    def ends(self, *, but: Sequence[Worker] = ()) -> tuple[int, int]:
        """(the shortest queue, the longest), of all `but` these."""
        changed = self._changed()
        if changed is None:
            self._count()
        else:
            for worker_id in changed:
                self._move(worker_id)
        numbers = self._numbers
        if but:
            numbers = numbers - Counter([worker.inflight_requests for worker in but])
        return min(numbers), max(numbers)

    def _move(self, worker_id: int) -> None:
        worker, old = self._workers.get(worker_id), self._lengths.pop(worker_id, None)
        if old is not None:
            self._numbers[old] -= 1
            if not self._numbers[old]:
                del self._numbers[old]
        if worker is not None:
            self._lengths[worker_id] = worker.inflight_requests
            self._numbers[worker.inflight_requests] += 1

    def _count(self) -> None:
        self._lengths = {worker_id: worker.inflight_requests for worker_id, worker in self._workers.items()}
        self._numbers = Counter(self._lengths.values())
