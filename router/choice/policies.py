"""Which worker gets the next request. Pure: candidates, what is known of the request, and randomness are given.

Ties are broken by an explicit key. Names are those of SGLang's router where it has them (docs/router.md).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from router.choice.load import comparable_by_share, least_loaded
from router.choice.load_order import load_key
from router.choice.ring import HashRing
from router.pool.pools import WorkerPool, by_id
from router.pool.worker import Role, Worker


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know of a request. `keys`: of its prompt's prefixes; `session`: whose it is, "" unknown.

    Both are left empty where no policy asks for them.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    keys: Sequence[bytes] = ()
    session: str = ""


class Placement(msgspec.Struct, frozen=True):
    """`cached_tokens`: of the prompt, that the worker has already, as far as we know."""

    worker: Worker
    cached_tokens: int = 0


def cost_tokens(choice: Placement, hints: RoutingHints) -> int:
    """What a request holds of its worker until it is done: prefill what it computes, the others all its KV."""
    if choice.worker.role is Role.PREFILL:
        return hints.prompt_tokens - choice.cached_tokens
    return hints.prompt_tokens + hints.output_tokens


class Policy(Protocol):
    def choose(self, candidates: Sequence[Worker], hints: RoutingHints) -> Placement:
        """One of `candidates` (all of one role, at least one, in the order of ids); it is going to be sent there."""

    def forget(self, worker: Worker) -> None:
        """This worker left, or lost what it knew."""


class Stateless:
    """A policy that remembers nothing of workers."""

    def forget(self, worker: Worker) -> None:
        return


class LeastLoad(Stateless):
    """Fewest tokens (router/choice/load.py); then fewest requests; then the fewest so far; then the oldest."""

    def choose(self, candidates: Sequence[Worker], hints: RoutingHints) -> Placement:
        return Placement(candidates[0] if len(candidates) == 1 else least_loaded(candidates))


class PowerOfTwo(Stateless):
    """Of two workers drawn at random the less loaded: nearly as even, and many routers do not all pick the same one.

    Mitzenmacher, "The power of two choices in randomized load balancing" (1996). `draw(n)`: a random integer in [0, n).
    """

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def choose(self, candidates: Sequence[Worker], hints: RoutingHints) -> Placement:
        if len(candidates) == 1:
            return Placement(candidates[0])
        first, second = self._draw(len(candidates)), self._draw(len(candidates) - 1)
        pair = (candidates[first], candidates[second + (second >= first)])
        by_share = comparable_by_share(pair)
        return Placement(min(pair, key=lambda worker: load_key(worker, by_share=by_share)))


class RoundRobin(Stateless):
    """The next worker by id after the last one chosen of that role, so that joining and leaving workers skip no one."""

    def __init__(self) -> None:
        self._last_id: dict[Role, int] = {}

    def choose(self, candidates: Sequence[Worker], hints: RoutingHints) -> Placement:
        last = self._last_id.get(candidates[0].role, -1)
        place = bisect_right(candidates, last, key=lambda worker: worker.worker_id)
        chosen = candidates[place % len(candidates)]
        self._last_id[chosen.role] = chosen.worker_id
        return Placement(chosen)


class Random(Stateless):
    """Uniform. `draw(n)` returns a random integer in [0, n)."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def choose(self, candidates: Sequence[Worker], hints: RoutingHints) -> Placement:
        return Placement(candidates[self._draw(len(candidates))])


class ConsistentHashing(Stateless):
    """A session always goes to the same worker (ring.py); requests without one go by load.

    Workers are identified by URL, so that all routers agree.
    """

    def choose(self, candidates: Sequence[Worker], hints: RoutingHints) -> Placement:
        if not hints.session:
            return Placement(least_loaded(candidates))
        pool = candidates if isinstance(candidates, WorkerPool) else WorkerPool(candidates)
        return Placement(pool.derived(by_id)[pool.derived(HashRing).owner(hints.session)])
