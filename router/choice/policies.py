"""Policies choose a request's worker, named as in SGLang's router (docs/router.md). Pure.

    load of prefill, encode   tokens queued for computation and in no cache
    load of decode, unified   KV of requests at their end, as share of capacity if all report it

Up to `SCANNED` workers are compared, else `DRAWN` random ones, whose best is nearly as lightly
loaded (Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 12(10),
2001; docs/reports/benchmarks.md).
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import msgspec

from router.pool.worker import MAX_WORKERS, Pool, Role, Worker, worker_id_of

SCANNED = 128
DRAWN = 16
_MASK = (1 << 64) - 1

Draw = Callable[[int], int]  # n -> a random integer in [0, n)
LoadKey = tuple[float, int, int, int]


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """Properties for policies; `keys` and `session` are empty if unused."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    keys: Sequence[Hashable] = ()
    session: str = ""


class Placement(msgspec.Struct, frozen=True):
    """A worker, and the tokens of the prompt it probably has cached."""

    worker: Worker
    cached_tokens: int = 0


def cost_tokens(choice: Placement, hints: RoutingHints) -> int:
    """Return a request's load: tokens to compute for prefill, else all its KV."""
    if choice.worker.role is Role.PREFILL:
        return hints.prompt_tokens - choice.cached_tokens
    return hints.prompt_tokens + hints.output_tokens


def load_key(worker: Worker) -> LoadKey:
    return (worker.load_tokens, worker.inflight_requests, worker.assigned_total, worker.worker_id)


def share_key(worker: Worker) -> LoadKey:
    return (worker.load_tokens / worker.capacity_tokens, *load_key(worker)[1:])


def key_for(workers: Sequence[Worker]) -> Callable[[Worker], LoadKey]:
    """Order by share if workers hold KV and all report a capacity."""
    by_share = workers[0].role.holds_kv and all([worker.capacity_tokens > 0 for worker in workers])
    return share_key if by_share else load_key


def least_loaded(workers: Sequence[Worker]) -> Worker:
    return min(workers, key=key_for(workers))


def few_of(pool: Pool, draw: Draw, count: int = DRAWN) -> Pool:
    size = len(pool)
    return pool if size <= SCANNED else [pool[at] for at in sorted({draw(size) for _ in range(count)})]


def owner(pool: Pool, name: str) -> Worker:
    """Return the owner of `name` (a session, an image), the same in every router.

    Rendezvous hashing (Thaler, Ravishankar, IEEE/ACM ToN 1998): the highest hash of name and
    worker. A worker that leaves moves only its names.
    """
    number = _hash64(name)
    scores = [number * _odd_hash(worker.url) & _MASK for worker in pool]
    return pool[scores.index(max(scores))]


def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big")


@lru_cache(maxsize=2 * MAX_WORKERS)
def _odd_hash(url: str) -> int:
    return _hash64(url) | 1


@dataclass(eq=False)
class Policy(ABC):
    draw: Draw

    @abstractmethod
    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        """Choose a worker of `pool` (not empty) without recording it."""

    def note(self, choice: Placement, hints: RoutingHints) -> None:  # noqa: B027 (most have no state)
        """Record that the request is sent there."""

    def choose(self, pool: Pool, hints: RoutingHints) -> Placement:
        choice = self.look(pool, hints)
        self.note(choice, hints)
        return choice

    def some(self, pool: Pool, hints: RoutingHints) -> list[Placement]:
        """Return up to `SCANNED` workers (router/history/forecast.py)."""
        return [Placement(worker) for worker in few_of(pool, self.draw, SCANNED)]


class LeastLoad(Policy):
    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(least_loaded(few_of(pool, self.draw)))


class PowerOfTwo(Policy):
    """The less loaded of two random workers, which spreads many routers."""

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        if len(pool) == 1:
            return Placement(pool[0])
        first, second = self.draw(len(pool)), self.draw(len(pool) - 1)
        return Placement(least_loaded((pool[first], pool[second + (second >= first)])))


@dataclass(eq=False)
class RoundRobin(Policy):
    """The next worker by id, so that joins and exits skip none."""

    _last_id: dict[Role, int] = field(default_factory=dict)

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        place = bisect_right(pool, self._last_id.get(pool[0].role, -1), key=worker_id_of)
        return Placement(pool[place % len(pool)])

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        self._last_id[choice.worker.role] = choice.worker.worker_id


class Random(Policy):
    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(pool[self.draw(len(pool))])


class ConsistentHashing(LeastLoad):
    """The session's `owner`; without session by load."""

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(owner(pool, hints.session)) if hints.session else super().look(pool, hints)
