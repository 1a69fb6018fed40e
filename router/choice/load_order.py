"""The workers of a pool in order of load, kept from request to request, and how many of them have queues of which length. Pure.

The order is a sorted list. Each reader first puts those right whose load has changed since the last one (`LoadLog`): a bisection
and a move of a few kilobytes for each, whatever the number of workers.

With peers (`--workers N`) loads change without an entry in the log. So each reader also looks at the next `SWEEP` workers in turn, and
at the first again until it stays the first. A worker is thus never chosen for less load than it has; that another process has
less there now is overlooked for as many choices as it takes to come round: none in a pool of up to `SWEEP`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from router.pool.pools import WorkerPool, by_id
from router.pool.worker import Worker

SWEEP = 16

LoadKey = tuple[float, int, int, int]


def load_key(worker: Worker, *, by_share: bool = False) -> LoadKey:
    """Less is less loaded; then fewer requests; then fewer so far; then the oldest worker."""
    load = worker.load_tokens / worker.capacity_tokens if by_share else worker.load_tokens
    return (load, worker.inflight_requests, worker.assigned_total, worker.worker_id)


class _Follower:
    """Reads a pool's log."""

    def __init__(self, pool: WorkerPool) -> None:
        self._log = pool.log
        self._read = self._log.end
        self._workers = pool.derived(by_id)

    def _news(self) -> Sequence[Worker] | None:
        """Whose load may have changed since the last call, each once; None: look at all."""
        place, self._read = self._read, self._log.end
        if place == self._read:
            return ()
        ids = self._log.since(place)
        if ids is None or len(ids) > len(self._workers):
            return None
        return [self._workers[i] for i in set(ids) if i in self._workers]


class LoadOrder(_Follower):
    """Least loaded first, by tokens."""

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__(pool)
        self._ids = list(self._workers)
        self._next = 0  # where the sweep goes on
        self._sort()

    def first(self) -> Worker:
        """The worker with the least load at the last `catch_up`."""
        return self._workers[self._order[0][3]]

    def walk(self) -> Iterator[Worker]:
        """All in order, the same."""
        return (self._workers[key[3]] for key in self._order)

    def catch_up(self) -> None:
        """Put right what has changed."""
        news = self._news()
        if news is None:
            self._sort()
        else:
            for worker in news:
                self._place(worker)
        if self._log.has_peers:
            self._sweep()

    def _sweep(self) -> None:
        for _ in range(min(SWEEP, len(self._ids))):
            self._place(self._workers[self._ids[self._next]])
            self._next = (self._next + 1) % len(self._ids)
        for _ in self._ids:
            if not self._place(self.first()):
                return

    def _place(self, worker: Worker) -> bool:
        """Where it belongs now; whether its key has changed."""
        old, new = self._keys[worker.worker_id], self._key(worker)
        if old == new:
            return False
        del self._order[bisect_left(self._order, old)]
        insort(self._order, new)
        self._keys[worker.worker_id] = new
        return True

    def _sort(self) -> None:
        self._keys = {worker_id: self._key(worker) for worker_id, worker in self._workers.items()}
        self._order = sorted(self._keys.values())

    def _key(self, worker: Worker) -> LoadKey:
        return load_key(worker)

    def check(self) -> None:
        """The order is that of the keys, one for each worker."""
        assert self._order == sorted(self._keys.values())
        assert self._keys.keys() == self._workers.keys()
        assert all(key[3] == worker_id for worker_id, key in self._keys.items())


class OrderByShare(LoadOrder):
    """By the share of a worker's KV that is taken; those that do not say how much they have come first."""

    def all_say(self) -> bool:
        """Whether all say how much they have: else the order means nothing."""
        return self._order[0][0] >= 0

    def _key(self, worker: Worker) -> LoadKey:
        if worker.capacity_tokens <= 0:
            return (-1.0, 0, 0, worker.worker_id)
        return load_key(worker, by_share=True)


class QueueLengths(_Follower):
    """How many workers of a pool have so many requests of this router, for each number that there is."""

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__(pool)
        self._count()

    def ends(self) -> tuple[int, int]:
        """(the shortest, the longest)."""
        news = self._news()
        if news is None:
            self._count()
        else:
            for worker in news:
                self._move(worker)
        return min(self._numbers), max(self._numbers)

    def _move(self, worker: Worker) -> None:
        old, new = self._lengths[worker.worker_id], worker.inflight_requests
        if old == new:
            return
        self._lengths[worker.worker_id] = new
        self._numbers[new] = self._numbers.get(new, 0) + 1
        self._numbers[old] -= 1
        if not self._numbers[old]:
            del self._numbers[old]

    def _count(self) -> None:
        self._lengths = {worker_id: worker.inflight_requests for worker_id, worker in self._workers.items()}
        self._numbers: dict[int, int] = {}
        for length in self._lengths.values():
            self._numbers[length] = self._numbers.get(length, 0) + 1
