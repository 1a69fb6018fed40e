"""The cache-aware policy: a prompt goes where it is computed soonest, counting what is cached of it. Pure.

    cost(worker) = tokens that wait there to be computed - weight * tokens of the prompt that it has cached
    weight       = 1 + RECOMPUTE_WEIGHT * requests at the worker that has the fewest (prefill and unified workers)

The least cost wins. On an idle worker a prefix is computed again at no cost to others; where all have queues that delays every request
behind it, so the weight grows with the queues (docs/router.md: on the Mooncake traces at twice their rate the median first token came
eight times later without; between 1 and 16 the constant makes little difference). Decode does not compute prompts: a prefix cached
there spares memory and a transfer, so its weight is 1. SGLang's thresholds apply: a match below
`cache_threshold` of the prompt is none, and beyond both balance thresholds the load alone decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.choice.policies import Placement, Policy, RoutingHints
from router.choice.prefix_index import PrefixIndex, PrefixMatch
from router.choice.prefix_keys import BLOCK_TOKENS
from router.config import ChoiceFlags
from router.pool.load_order import LoadKey, LoadOrder, load_key
from router.pool.pool import WorkerPool
from router.pool.worker import Role, Worker

RECOMPUTE_WEIGHT = 4
SMALL_GROUP = 16  # workers with equally much cached: up to this many are compared one by one


@dataclass(frozen=True, slots=True)
class CacheAware(Policy):
    """`index` is this policy's own; KV events may feed it, too."""

    index: PrefixIndex
    flags: ChoiceFlags

    def look(self, candidates: WorkerPool, hints: RoutingHints) -> Placement:
        matched = self.index.match(hints.keys)
        worker = self._soonest(candidates, hints, matched)
        return Placement(worker, cached_of(matched, worker, hints))

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        if hints.keys:
            self.index.touch(choice.worker.worker_id, hints.keys)

    def _soonest(self, candidates: WorkerPool, hints: RoutingHints, matched: PrefixMatch) -> Worker:
        if not matched.groups:
            return candidates.least_loaded()
        shortest, longest = candidates.queues.ends()
        if unbalanced(shortest, longest, self.flags):
            return candidates.least_loaded()
        least = self.flags.cache_threshold * hints.prompt_tokens
        weight = 1 if candidates[0].role is Role.DECODE else 1 + RECOMPUTE_WEIGHT * shortest
        groups = [
            Credit(weight * depth * BLOCK_TOKENS, bits)
            for depth, bits in matched.groups
            if depth * BLOCK_TOKENS >= least
        ]
        return _least_cost(candidates, groups, matched)


class Credit(NamedTuple):
    """The worth of a cached prefix, in tokens of wait, and the workers that have it: bits of the index."""

    tokens: int
    bits: int


def _least_cost(pool: WorkerPool, groups: Sequence[Credit], matched: PrefixMatch) -> Worker:
    """The best of the least loaded of all and of each group. Of a large group one comes soon in the order of load."""
    order = pool.order_by_tokens()
    best = order.first()
    best_key = _cost_key(best, 0)
    for credit in groups:
        if credit.bits.bit_count() <= SMALL_GROUP:
            members = map(pool.by_id.get, matched.ids(credit.bits))
            worker = min(filter(None, members), key=load_key, default=None)
        else:
            worker = _first_of(order, credit, matched, best_key[0])
        if worker is not None and (key := _cost_key(worker, credit.tokens)) < best_key:
            best, best_key = worker, key
    return best


def _first_of(order: LoadOrder, credit: Credit, matched: PrefixMatch, best_cost: float) -> Worker | None:
    """The least loaded of a group; None if it costs more than `best_cost`."""
    for worker in order.walk():
        if worker.load_tokens - credit.tokens > best_cost:
            return None
        if matched.has(worker.worker_id, credit.bits):
            return worker
    return None


def _cost_key(worker: Worker, credit: int) -> LoadKey:
    """The cost first; ties as of load."""
    key = load_key(worker)
    return (key[0] - credit, *key[1:])


def unbalanced(shortest: int, longest: int, flags: ChoiceFlags) -> bool:
    """Whether queue lengths differ by more than both balance thresholds."""
    return longest - shortest > flags.balance_abs_threshold and longest > flags.balance_rel_threshold * shortest


def cached_of(matched: PrefixMatch, worker: Worker, hints: RoutingHints) -> int:
    """Tokens of the prompt that `worker` has cached; the last token is always computed."""
    return max(0, min(matched.depth(worker.worker_id) * BLOCK_TOKENS, hints.prompt_tokens - 1))
