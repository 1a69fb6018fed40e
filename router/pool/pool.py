"""A pool: the workers of one role that serve one model, and what policies derive from them. Pure.

The table keeps a pool from request to request: workers join and leave it one by one (`members.py`). Its orders read from a log which
workers have changed, so no request looks at all of them.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from functools import cached_property
from typing import Protocol, TypeVar

from router.pool.load_order import LoadOrder, QueueLengths, load_key, share_key
from router.pool.ring import HashRing
from router.pool.servers import Server, ServerGroups
from router.pool.worker import LoadLog, Role, Worker, worker_id_of

MAX_NARROWED = 4  # narrower pools kept with each: a circuit that is tried opens and closes for some requests
MAX_DERIVED = 16  # orders of other packages kept with each
MAX_GAPS = 16  # workers that are passed over one by one; where there are more, a pool is made without them

T = TypeVar("T")


class NoneInTime(LookupError):
    """None of the candidates would keep the request's objectives (router/admission/in_time.py)."""


class Candidates(Protocol):
    """Workers of one role of which a policy chooses one, in the order of ids."""

    @property
    def role(self) -> Role: ...
    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Worker: ...
    def __iter__(self) -> Iterator[Worker]: ...
    def __contains__(self, worker: object, /) -> bool: ...

    @property
    def by_cache(self) -> bool:
        """Whether a worker belongs to it only if it has some of the prompt cached."""

    def member(self, worker_id: int, *, cached_tokens: int = 0) -> Worker | None:
        """Return this worker, if it belongs to the pool with so much of the prompt cached there."""

    def in_order(self, *, cached_tokens: int = 0) -> Iterator[Worker]:
        """Yield the workers by tokens, the least loaded first."""

    def least_loaded(self) -> Worker:
        """The least by `key_for`."""

    def queue_ends(self) -> tuple[int, int]:
        """(the shortest queue, the longest)."""

    def owner(self, session: str) -> Worker:
        """The worker that a session belongs to (router/pool/ring.py)."""


class WorkerPool(list[Worker]):
    """Workers in the order of ids. `join` and `leave` belong to its owner."""

    by_cache = False

    def __init__(self, workers: Iterable[Worker] = (), log: LoadLog | None = None) -> None:
        super().__init__(sorted(workers, key=worker_id_of))
        self.log = log or LoadLog()
        self.by_id = {worker.worker_id: worker for worker in self}
        self._narrowed: dict[Hashable, WorkerPool] = {}
        self._derived: dict[Hashable, object] = {}

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and self.by_id.get(worker.worker_id) is worker

    def join(self, worker: Worker) -> None:
        insort(self, worker, key=worker_id_of)
        self.by_id[worker.worker_id] = worker
        self._on_member(worker)
        if "ring" in self.__dict__:
            self.ring.add(worker)

    def leave(self, worker: Worker) -> None:
        del self[bisect_left(self, worker.worker_id, key=worker_id_of)]
        del self.by_id[worker.worker_id]
        self._on_member(worker)
        if "ring" in self.__dict__:
            self.ring.remove(worker)

    def _on_member(self, worker: Worker) -> None:
        self._narrowed.clear()
        self.log.note(worker.worker_id)

    @property
    def role(self) -> Role:
        return self[0].role

    @cached_property
    def by_tokens(self) -> LoadOrder:
        return LoadOrder(self, self.by_id, self.log, load_key)

    @cached_property
    def by_share(self) -> LoadOrder:
        return LoadOrder(self, self.by_id, self.log, share_key)

    @cached_property
    def queues(self) -> QueueLengths:
        return QueueLengths(self.by_id, self.log)

    @cached_property
    def ring(self) -> HashRing:
        return HashRing(self)

    @cached_property
    def servers(self) -> ServerGroups:
        return ServerGroups(self.by_id, self.log, on_change=self._narrowed.clear)

    @cached_property
    def _with_room(self) -> "QueuelessWorkers":
        return QueuelessWorkers(self)

    @property
    def queueless(self) -> "WorkerPool":
        """Return the workers whose reports name no waiting request."""
        return self._with_room.pool()

    def order_by_tokens(self) -> LoadOrder:
        self.by_tokens.catch_up()
        return self.by_tokens

    def order_by_share(self) -> LoadOrder | None:
        """None unless these workers hold KV, and all report a capacity."""
        if not self.role.holds_kv:
            return None
        self.by_share.catch_up()
        return self.by_share if self.by_share.all_known() else None

    def member(self, worker_id: int, *, cached_tokens: int = 0) -> Worker | None:
        return self.by_id.get(worker_id)

    def in_order(self, *, cached_tokens: int = 0) -> Iterator[Worker]:
        return self.order_by_tokens().walk()

    def least_loaded(self) -> Worker:
        if len(self) == 1:
            return self[0]
        order = self.order_by_share()
        return (self.order_by_tokens() if order is None else order).first()

    def queue_ends(self) -> tuple[int, int]:
        return self.queues.ends()

    def owner(self, session: str) -> Worker:
        return self.by_id[self.ring.owner(session)]

    def without(self, worker_ids: Set[int]) -> "WorkerPool | NarrowedPool":
        """The pool but for these workers."""
        if len(worker_ids) > MAX_GAPS:
            return self._made_without(frozenset(worker_ids), worker_ids)
        gone = frozenset([worker_id for worker_id in worker_ids if worker_id in self.by_id])
        return NarrowedPool(self, gone) if gone else self

    def beside(self, servers: Collection[Server]) -> "WorkerPool | NarrowedPool":
        """The workers that decode finds at other bootstrap servers than these."""
        if not servers:
            return self
        self.servers.catch_up()
        groups = [self.servers.at(server) for server in servers]
        if sum(map(len, groups)) <= MAX_GAPS:
            return self.without({worker_id for group in groups for worker_id in group})
        return self._made_without(frozenset(servers), {worker_id for group in groups for worker_id in group})

    def derived(self, name: Hashable, make: Callable[["WorkerPool"], T]) -> T:
        """Return what `make` made of this pool under that name. It follows the pool's log; the least recently used is dropped."""
        found = self._derived.pop(name, None)
        if found is None:
            found = make(self)
            if len(self._derived) >= MAX_DERIVED:
                del self._derived[next(iter(self._derived))]
        self._derived[name] = found
        return found  # type: ignore[return-value]

    def _made_without(self, name: Hashable, worker_ids: Set[int]) -> "WorkerPool":
        found = self._narrowed.pop(name, None)
        if found is None:
            found = WorkerPool([worker for worker in self if worker.worker_id not in worker_ids], self.log)
            if len(self._narrowed) >= MAX_NARROWED:
                del self._narrowed[next(iter(self._narrowed))]
        self._narrowed[name] = found  # the last that is used goes last
        return found


EMPTY = WorkerPool()


class QueuelessWorkers:
    """The workers of a pool without a queue, as a pool of their own. `Loads.on_report` notes a queue that begins or ends."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._read = pool.log.end
        self._free = self._made()

    def pool(self) -> WorkerPool:
        place, self._read = self._read, self._pool.log.end
        ids = self._pool.log.since(place)
        if ids is None or len(ids) > len(self._pool):
            self._free = self._made()
            return self._free
        for worker_id in set(ids):
            worker, known = self._pool.by_id.get(worker_id), self._free.by_id.get(worker_id)
            if worker is None or worker.has_queue:
                if known is not None:
                    self._free.leave(known)
            elif known is None:
                self._free.join(worker)
        return self._free

    def _made(self) -> WorkerPool:
        return WorkerPool([worker for worker in self._pool if not worker.has_queue], self._pool.log)


class NarrowedPool:
    """A pool but for a few of its workers, `gone`, for one choice. All it does costs as much as of the pool, and a step for each of them."""

    by_cache = False

    def __init__(self, pool: WorkerPool, gone: frozenset[int]) -> None:
        self._pool = pool
        self._gone = gone
        self._gaps = sorted([bisect_left(pool, worker_id, key=worker_id_of) for worker_id in gone])

    def __len__(self) -> int:
        return len(self._pool) - len(self._gaps)

    def __getitem__(self, place: int) -> Worker:
        for gap in self._gaps:
            place += gap <= place
        return self._pool[place]

    def __iter__(self) -> Iterator[Worker]:
        return (worker for worker in self._pool if worker.worker_id not in self._gone)

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and self.member(worker.worker_id) is worker

    @property
    def role(self) -> Role:
        return self._pool.role

    @property
    def queueless(self) -> "WorkerPool | NarrowedPool":
        return self._pool.queueless.without(self._gone)

    def without(self, worker_ids: Set[int]) -> "WorkerPool | NarrowedPool":
        return self._pool.without(self._gone | worker_ids) if worker_ids else self

    def beside(self, servers: Collection[Server]) -> "WorkerPool | NarrowedPool":
        return self._pool.beside(servers).without(self._gone) if servers else self

    def derived(self, name: Hashable, make: Callable[[WorkerPool], T]) -> T:
        """Of the whole pool."""
        return self._pool.derived(name, make)

    def member(self, worker_id: int, *, cached_tokens: int = 0) -> Worker | None:
        return None if worker_id in self._gone else self._pool.by_id.get(worker_id)

    def in_order(self, *, cached_tokens: int = 0) -> Iterator[Worker]:
        return self._left(self._pool.order_by_tokens())

    def least_loaded(self) -> Worker:
        if self.role.holds_kv:
            self._pool.by_share.catch_up()
            worker = next(self._left(self._pool.by_share))
            if worker.capacity_tokens > 0:  # those that report none come first
                return worker
        return next(self.in_order())

    def queue_ends(self) -> tuple[int, int]:
        return self._pool.queues.ends(but=[self._pool.by_id[worker_id] for worker_id in self._gone])

    def owner(self, session: str) -> Worker:
        return self._pool.by_id[self._pool.ring.owner(session, takes=lambda worker_id: worker_id not in self._gone)]

    def _left(self, order: LoadOrder) -> Iterator[Worker]:
        return (worker for worker in order.walk() if worker.worker_id not in self._gone)


Pool = WorkerPool | NarrowedPool
