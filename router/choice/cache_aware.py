"""The cache-aware policy: a prompt goes where it is computed soonest, counting what is cached of it. Pure.

    cost(worker) = tokens that wait there to be computed - weight * tokens of the prompt that it has cached
    weight       = 1 + RECOMPUTE_WEIGHT * requests at the worker that has the fewest

The least cost wins. While some worker is idle the weight is 1, and the cost is the prompt's own wait: to compute a
prefix again on an idle machine harms no request. Where all have queues it delays every request behind it, so the more wait
the more a cached prefix is worth. Without that an overloaded pool spreads each prefix over all workers, computes more,
and is overloaded further: on the Mooncake traces at twice their rate the median first token came eight times later. Between 1
and 16 the constant makes little difference there (docs/router.md).

SGLang's thresholds are the limits around it: a match below `cache_threshold` of the prompt counts as none, and while
queues are unequal beyond both balance thresholds the cache is not asked at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.choice.load import least_loaded, order_by_tokens
from router.choice.load_order import LoadKey, LoadOrder, QueueLengths, load_key
from router.choice.policies import Placement, RoutingHints
from router.choice.prefix_index import PrefixIndex, PrefixMatch
from router.choice.prefix_keys import BLOCK_TOKENS
from router.pool.pools import WorkerPool, by_id
from router.pool.worker import Worker

RECOMPUTE_WEIGHT = 4
SMALL_GROUP = 16  # workers that have equally much cached: so few are gone through


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAwareSettings:
    """Flags of the same names."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5


class CacheAware:
    """`index` is this policy's own; KV events may feed it, too."""

    def __init__(self, index: PrefixIndex, settings: CacheAwareSettings) -> None:
        self.index = index
        self._settings = settings

    def choose(self, candidates: Sequence[Worker], hints: RoutingHints) -> Placement:
        """It will be remembered that the prompt went there."""
        matched = self.index.holders(hints.keys)
        worker = self._soonest(candidates, hints, matched)
        choice = Placement(worker, cached_of(matched, worker, hints))
        if hints.keys:
            self.index.touch(worker.worker_id, hints.keys)
        return choice

    def forget(self, worker: Worker) -> None:
        self.index.forget(worker.worker_id)

    def _soonest(self, candidates: Sequence[Worker], hints: RoutingHints, matched: PrefixMatch) -> Worker:
        if not matched.groups:
            return least_loaded(candidates)
        shortest, longest = queue_ends(candidates)
        if unbalanced(shortest, longest, self._settings):
            return least_loaded(candidates)
        least = self._settings.cache_threshold * hints.prompt_tokens
        weight = 1 + RECOMPUTE_WEIGHT * shortest
        groups = [
            Credit(weight * depth * BLOCK_TOKENS, bits)
            for depth, bits in matched.groups
            if depth * BLOCK_TOKENS >= least
        ]
        if isinstance(candidates, WorkerPool):
            return soonest_of_pool(candidates, groups, matched)
        return soonest_of_few(candidates, groups, matched)


class Credit(NamedTuple):
    """What a cached prefix is worth, in tokens of wait, and which workers have it: bits of the index."""

    tokens: int
    bits: int


def soonest_of_few(candidates: Iterable[Worker], groups: Sequence[Credit], matched: PrefixMatch) -> Worker:
    """The one with the least cost, by looking at each."""
    credits = {worker_id: credit.tokens for credit in groups for worker_id in matched.ids(credit.bits)}
    return min(candidates, key=lambda worker: _cost_key(worker, credits.get(worker.worker_id, 0)))


def soonest_of_pool(pool: WorkerPool, groups: Sequence[Credit], matched: PrefixMatch) -> Worker:
    """The same one. Of all that have as much cached it can only be the least loaded, so one of each group is looked at,

    and the least loaded of all. A small group is gone through; of a large one some member is soon met in the order of load.
    """
    order, workers = order_by_tokens(pool), pool.derived(by_id)
    best = order.first()
    best_key = _cost_key(best, 0)
    for credit in groups:
        if credit.bits.bit_count() <= SMALL_GROUP:
            members = map(workers.get, matched.ids(credit.bits))
            worker = min(filter(None, members), key=load_key, default=None)
        else:
            worker = _first_of(order, credit, matched, best_key[0])
        if worker is not None and (key := _cost_key(worker, credit.tokens)) < best_key:
            best, best_key = worker, key
    return best


def _first_of(order: LoadOrder, credit: Credit, matched: PrefixMatch, best_cost: float) -> Worker | None:
    """The least loaded of a group; None where it could not be better than what was found."""
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


def queue_ends(candidates: Sequence[Worker]) -> tuple[int, int]:
    """(the fewest requests of this router at one of them, the most)."""
    if isinstance(candidates, WorkerPool):
        return candidates.derived(QueueLengths).ends()
    queues = [worker.inflight_requests for worker in candidates]
    return min(queues), max(queues)


def unbalanced(shortest: int, longest: int, settings: CacheAwareSettings) -> bool:
    """Whether the longest queue is more than `balance_abs_threshold` requests longer than the shortest, and more than

    `balance_rel_threshold` times as long.
    """
    return longest - shortest > settings.balance_abs_threshold and longest > settings.balance_rel_threshold * shortest


def cached_of(matched: PrefixMatch, worker: Worker, hints: RoutingHints) -> int:
    """Tokens of the prompt that `worker` has cached; never all of them: the last one is always computed."""
    return max(0, min(matched.depth(worker.worker_id) * BLOCK_TOKENS, hints.prompt_tokens - 1))
