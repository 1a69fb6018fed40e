"""The cache-aware policy: a prompt goes where it is computed soonest, counting what is cached of it. Pure.

    wait(worker) = tokens that wait there to be computed + tokens of the prompt that it has not cached

The least wait wins. SGLang's router sends a prompt to the longest match as long as queues are not too unequal; on the
Mooncake traces that fills one queue while others idle (docs/router.md), so here a longer match has to be worth its
queue, and SGLang's thresholds are the limits around it: a match below `cache_threshold` of the prompt counts as none,
and while queues are unequal beyond both balance thresholds the cache is not asked at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.load import least_loaded, load_key
from router.policies import Ask, Choice
from router.prefix_index import PrefixIndex
from router.prefix_keys import BLOCK_TOKENS
from router.workers import Worker


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
        best, best_wait = candidates[0], float("inf")
        for worker in candidates:  # a plain loop: it runs over every worker for every request
            cached = matched.get(worker.worker_id, 0) * BLOCK_TOKENS
            wait = worker.inflight_tokens + worker.foreign_tokens - (cached if cached >= least else 0)
            if wait < best_wait or (wait == best_wait and load_key(worker)[1:] < load_key(best)[1:]):
                best, best_wait = worker, wait
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
