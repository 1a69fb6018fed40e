"""The cache-aware policy: a prompt goes where it is computed soonest, counting what is cached of it. Pure.

    cost(worker) = tokens that wait there to be computed - weight * tokens of the prompt that it has cached
    weight       = 1 + RECOMPUTE_WEIGHT * requests at the worker that has the fewest

The least cost wins. While some worker is idle the weight is 1, and the cost is the prompt's own wait: to compute a
prefix again on an idle machine harms nobody. Where all have queues it delays everybody behind it, too, so the more wait
the more a cached prefix is worth. Without that an overloaded pool spreads each prefix over all workers, computes more,
and is overloaded further: on the Mooncake traces at twice their rate the median first token came eight times later. Between 1
and 16 the constant makes little difference there (docs/router.md).

SGLang's thresholds are the limits around it: a match below `cache_threshold` of the prompt counts as none, and while
queues are unequal beyond both balance thresholds the cache is not asked at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.choice.load import least_loaded, load_key
from router.choice.policies import Ask, Choice
from router.choice.prefix_index import PrefixIndex
from router.choice.prefix_keys import BLOCK_TOKENS
from router.pool.workers import Worker

RECOMPUTE_WEIGHT = 4


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

    def choose(self, candidates: Sequence[Worker], ask: Ask) -> Choice:
        """It will be remembered that the prompt went there."""
        matched = self.index.match(ask.keys) if ask.keys else {}
        worker = self._soonest(candidates, ask, matched)
        if ask.keys:
            self.index.touch(worker.worker_id, ask.keys)
        return Choice(worker, cached_of(matched, worker, ask))

    def forget(self, worker: Worker) -> None:
        self.index.forget(worker.worker_id)

    def _soonest(self, candidates: Sequence[Worker], ask: Ask, matched: dict[int, int]) -> Worker:
        if not matched or unbalanced(candidates, self._settings):
            return least_loaded(candidates)
        least = self._settings.cache_threshold * ask.prompt_tokens
        weight = 1 + RECOMPUTE_WEIGHT * min(worker.inflight_requests for worker in candidates)
        best, best_cost = candidates[0], float("inf")
        for worker in candidates:  # a plain loop: it runs over every worker for every request
            cached = matched.get(worker.worker_id, 0) * BLOCK_TOKENS
            cost = worker.load_tokens - (weight * cached if cached >= least else 0)
            if cost < best_cost or (cost == best_cost and load_key(worker)[1:] < load_key(best)[1:]):
                best, best_cost = worker, cost
        return best


def unbalanced(candidates: Sequence[Worker], settings: CacheAwareSettings) -> bool:
    """Whether the longest queue is more than `balance_abs_threshold` requests longer than the shortest, and more than

    `balance_rel_threshold` times as long.
    """
    queues = [worker.inflight_requests for worker in candidates]
    longest, shortest = max(queues), min(queues)
    return longest - shortest > settings.balance_abs_threshold and longest > settings.balance_rel_threshold * shortest


def cached_of(matched: dict[int, int], worker: Worker, ask: Ask) -> int:
    """Tokens of the prompt that `worker` has cached; never all of them: the last one is always computed."""
    return max(0, min(matched.get(worker.worker_id, 0) * BLOCK_TOKENS, ask.prompt_tokens - 1))
