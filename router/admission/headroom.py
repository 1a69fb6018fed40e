"""Workers in the order of their headroom: how much more each can take and still keep an objective. Pure.

    headroom   x for which the fitted line reaches the wanted time, less what is there; infinite of a worker of which nothing is known

A request is in time at the workers whose headroom is at least its own size: a beginning of the order. Of these the least loaded is wanted,
so the order is cut into blocks of about `BLOCK` workers, each sorted by load: the blocks of that beginning, merged, yield its workers
by load. To find the first costs a step for each block, and looks at the workers of one block at most (square-root decomposition).
"""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from router.pool.load_order import SWEEP, LoadKey, LogReader
from router.pool.pool import WorkerPool
from router.pool.worker import LoadLog, Worker

BLOCK = 64

_Place = tuple[float, int]  # (-headroom, worker id)
_FIRST: _Place = (-math.inf, -1)


class HeadroomOrder(LogReader):
    """The workers of `pool` by headroom. `also`: ids of workers whose lines have changed. `headroom`, `key`: of a worker; `key` ends with its id."""

    def __init__(
        self,
        pool: WorkerPool,
        *,
        also: LoadLog,
        headroom: Callable[[Worker], float],
        key: Callable[[Worker], LoadKey],
    ) -> None:
        super().__init__(pool.by_id, pool.log, also=also)
        self._pool = pool
        self._headroom = headroom
        self._key = key
        self._next = 0  # where the sweep goes on
        self._make()

    def catch_up(self) -> None:
        changed = self._changed()
        if changed is None:
            self._make()
        else:
            for worker_id in changed:
                self._move(worker_id)
        if self._log.has_peers:
            self._sweep()

    def walk(self, size: float) -> Iterator[Worker]:
        """Yield the workers with a headroom of at least `size` and the rest of their last block, in the order of `key`. Check each by its line."""
        slack = 1e-6 * (1.0 + abs(size))  # what floats are off by
        end = bisect_right(self._begins, (slack - size, math.inf))
        return (self._pool.by_id[key[3]] for key in heapq.merge(*self._blocks[:end]))

    def most(self) -> Iterator[Worker]:
        """Yield the workers of the first block, the one with most headroom first."""
        ids = sorted(key[3] for key in self._blocks[0])
        return iter(sorted((self._pool.by_id[i] for i in ids), key=lambda worker: self._of[worker.worker_id][0]))

    def _sweep(self) -> None:
        """Read some loads again, as LoadOrder does: other processes change them without a log entry."""
        count = len(self._pool)
        for _ in range(min(SWEEP, count)):
            self._next = self._next + 1 if self._next + 1 < count else 0
            self._move(self._pool[self._next].worker_id)

    def _move(self, worker_id: int) -> None:
        worker, old = self._pool.by_id.get(worker_id), self._of.get(worker_id)
        new = None if worker is None else ((-self._headroom(worker), worker_id), self._key(worker))
        if old == new:
            return
        if old is not None:
            self._take_out(*old)
        if new is None:
            del self._of[worker_id]
        else:
            self._of[worker_id] = new
            self._put_in(*new)

    def _block_of(self, place: _Place) -> int:
        return bisect_right(self._begins, place) - 1

    def _take_out(self, place: _Place, key: LoadKey) -> None:
        at = self._block_of(place)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        if not block and len(self._blocks) > 1:
            del self._blocks[at], self._begins[at]
            self._begins[0] = _FIRST

    def _put_in(self, place: _Place, key: LoadKey) -> None:
        at = self._block_of(place)
        block = self._blocks[at]
        insort(block, key)
        if len(block) > 2 * BLOCK:
            places = sorted(self._of[key[3]][0] for key in block)
            middle = places[len(places) // 2]
            self._begins.insert(at + 1, middle)
            self._blocks[at] = [key for key in block if self._of[key[3]][0] < middle]
            self._blocks.insert(at + 1, [key for key in block if self._of[key[3]][0] >= middle])

    def _make(self) -> None:
        self._of: dict[int, tuple[_Place, LoadKey]] = {
            worker.worker_id: ((-self._headroom(worker), worker.worker_id), self._key(worker)) for worker in self._pool
        }
        in_order = sorted(self._of.values())
        parts = [in_order[at : at + BLOCK] for at in range(0, len(in_order), BLOCK)] or [[]]
        self._blocks: list[list[LoadKey]] = [sorted(key for _, key in part) for part in parts]
        self._begins: list[_Place] = [_FIRST, *(part[0][0] for part in parts[1:])]

    def check(self) -> None:
        assert self._of.keys() == self._pool.by_id.keys()
        assert len(self._begins) == len(self._blocks) and self._begins == sorted(self._begins)
        for at, block in enumerate(self._blocks):
            assert block == sorted(block) and len(block) <= 2 * BLOCK
            homes = {self._block_of(self._of[key[3]][0]) for key in block}
            assert homes <= {at} and all(self._of[key[3]][1] == key for key in block)
        assert sum(len(block) for block in self._blocks) == len(self._of)
