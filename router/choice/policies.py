"""Policies choose the worker of the next request. Pure. Names follow SGLang's router (docs/router.md).

Load is what a role runs out of first:

    prefill, encode   tokens, of prompts or of images, that wait to be computed and are in no cache
    decode, unified   KV that requests will hold when they end, as a share of capacity where all
                      workers report theirs

A policy compares all workers of a pool of up to `SCANNED`, and `DRAWN` random ones of a larger pool.
The best of d random workers is nearly as lightly loaded as the best of all: Mitzenmacher, "The power of
two choices in randomized load balancing", IEEE TPDS 12(10), 2001. Measured: docs/reports/benchmarks.md.
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
    """The properties of a request that a policy reads.

    `keys`: of its prompt's prefixes. `session`: "" unknown. Both are empty if no policy needs them.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    keys: Sequence[Hashable] = ()
    session: str = ""


class Placement(msgspec.Struct, frozen=True):
    """`cached_tokens`: how much of the prompt the worker probably has cached."""

    worker: Worker
    cached_tokens: int = 0


def cost_tokens(choice: Placement, hints: RoutingHints) -> int:
    """Return the load of a request at its worker: for prefill tokens to compute, else all its KV."""
    if choice.worker.role is Role.PREFILL:
        return hints.prompt_tokens - choice.cached_tokens
    return hints.prompt_tokens + hints.output_tokens


def load_key(worker: Worker) -> LoadKey:
    """Order by tokens, then by live requests, requests so far, and age."""
    return (worker.load_tokens, worker.inflight_requests, worker.assigned_total, worker.worker_id)


def share_key(worker: Worker) -> LoadKey:
    """Order by the share of capacity, then as `load_key`. The capacity is known."""
    return (worker.load_tokens / worker.capacity_tokens, *load_key(worker)[1:])


def key_for(workers: Sequence[Worker]) -> Callable[[Worker], LoadKey]:
    """Return the key to compare workers by: shares if they hold KV and all report a capacity."""
    by_share = workers[0].role.holds_kv and all([worker.capacity_tokens > 0 for worker in workers])
    return share_key if by_share else load_key


def least_loaded(workers: Sequence[Worker]) -> Worker:
    return min(workers, key=key_for(workers))


def few_of(pool: Pool, draw: Draw, count: int = DRAWN) -> Pool:
    """Return the whole pool if it has up to `SCANNED` workers, else at most `count` random ones."""
    size = len(pool)
    return pool if size <= SCANNED else [pool[at] for at in sorted({draw(size) for _ in range(count)})]


def owner(pool: Pool, name: str) -> Worker:
    """Return the worker that `name` (a session, an image) belongs to, the same in every router.

    Rendezvous hashing (Thaler, Ravishankar, IEEE/ACM ToN 1998): the worker with the highest hash of both.
    A worker that leaves moves its own names only; one that joins only takes.
    """
    number = _hash64(name)
    scores = [number * _odd_hash(worker.url) & _MASK for worker in pool]
    return pool[scores.index(max(scores))]


def _hash64(text: str) -> int:
    """Return a number of 64 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big")


@lru_cache(maxsize=2 * MAX_WORKERS)
def _odd_hash(url: str) -> int:
    return _hash64(url) | 1


@dataclass(eq=False)
class Policy(ABC):
    draw: Draw

    @abstractmethod
    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        """Find the worker of `pool` (at least one) to choose. Remember nothing: it may go elsewhere."""

    def note(self, choice: Placement, hints: RoutingHints) -> None:  # noqa: B027 (most remember nothing)
        """Remember that the request is sent there, as far as the policy remembers anything."""

    def choose(self, pool: Pool, hints: RoutingHints) -> Placement:
        """`look` and `note`."""
        choice = self.look(pool, hints)
        self.note(choice, hints)
        return choice

    def some(self, pool: Pool, hints: RoutingHints) -> list[Placement]:
        """Return up to `SCANNED` workers of `pool` and what they have cached (router/admission/in_time.py)."""
        return [Placement(worker) for worker in few_of(pool, self.draw, SCANNED)]


class LeastLoad(Policy):
    """The least loaded."""

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(least_loaded(few_of(pool, self.draw)))


class PowerOfTwo(Policy):
    """The less loaded of two random workers: many routers do not all pick the same one."""

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        if len(pool) == 1:
            return Placement(pool[0])
        first, second = self.draw(len(pool)), self.draw(len(pool) - 1)
        return Placement(least_loaded((pool[first], pool[second + (second >= first)])))


@dataclass(eq=False)
class RoundRobin(Policy):
    """The next worker by id after the last one of that role, so that workers that join or leave cause no skips."""

    _last_id: dict[Role, int] = field(default_factory=dict)

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        place = bisect_right(pool, self._last_id.get(pool[0].role, -1), key=worker_id_of)
        return Placement(pool[place % len(pool)])

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        self._last_id[choice.worker.role] = choice.worker.worker_id


class Random(Policy):
    """Uniform."""

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(pool[self.draw(len(pool))])


class ConsistentHashing(LeastLoad):
    """A session goes to its `owner`, the same in every router; requests without one go by load."""

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(owner(pool, hints.session)) if hints.session else super().look(pool, hints)
