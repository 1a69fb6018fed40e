"""A pool: the workers of one role that serve one model, as a list that stays the same until one of them changes.

The table makes a pool once and gives it to request after request, so what a policy has worked out about it (`derived`) can be
kept with it. Loads change with every request and pools do not, so those come by a log: each reader remembers how far it has
read. Pure; knows no policy.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from router.pool.worker import Worker

T = TypeVar("T")

MAX_LOG = 1 << 14  # changes that are kept; a reader that is further behind looks at every worker instead
MAX_NARROWED = 4  # narrower pools kept with each: a circuit that is tried opens and closes for some requests


class LoadLog:
    """`ids` of workers whose load or report has changed, in order; `trim` when they are more than `2 * MAX_LOG`.

    `has_peers`: other processes change loads, too, and log nothing here.
    """

    __slots__ = ("_dropped", "has_peers", "ids")

    def __init__(self, *, has_peers: bool = False) -> None:
        self.has_peers = has_peers
        self.ids: list[int] = []
        self._dropped = 0

    def trim(self) -> None:
        """Drop the oldest."""
        del self.ids[:MAX_LOG]
        self._dropped += MAX_LOG

    @property
    def end(self) -> int:
        """What there is to read, up to now."""
        return self._dropped + len(self.ids)

    def since(self, place: int) -> Sequence[int] | None:
        """Workers that have changed since `end` was `place`; None: too many to say."""
        begin = place - self._dropped
        return self.ids[begin:] if begin >= 0 else None


class WorkerPool(list["Worker"]):
    """In the order of ids. Never changed: where one of its workers comes or goes, there is another pool."""

    __slots__ = ("_derived", "_narrowed", "log")

    def __init__(self, workers: Iterable["Worker"], log: LoadLog | None = None) -> None:
        super().__init__(workers)
        self.log = log or LoadLog()
        self._derived: dict[Any, Any] = {}
        self._narrowed: dict[frozenset[int], WorkerPool] = {}

    def derived(self, make: "Callable[[WorkerPool], T]") -> T:
        """What `make` makes of this pool, made once."""
        found: T | None = self._derived.get(make)
        if found is None:
            found = self._derived[make] = make(self)
        return found

    def without(self, worker_ids: frozenset[int]) -> "WorkerPool":
        """The others."""
        found = self._narrowed.pop(worker_ids, None)
        if found is None:
            found = WorkerPool([worker for worker in self if worker.worker_id not in worker_ids], self.log)
            if len(self._narrowed) >= MAX_NARROWED:
                del self._narrowed[next(iter(self._narrowed))]
        self._narrowed[worker_ids] = found  # the last that is used goes last
        return found


def by_id(pool: WorkerPool) -> dict[int, "Worker"]:
    """Its workers by their ids."""
    return {worker.worker_id: worker for worker in pool}
