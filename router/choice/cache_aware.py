"""The cache-aware policy: the worker that computes a prompt soonest, given its cached prefix. Pure.

    cost(worker) = tokens queued there for prefill - weight * cached tokens of the prompt
    weight       = 1 + RECOMPUTE_WEIGHT * fewest requests at any worker (prefill and unified)

Recomputing on an idle worker delays no one, so the weight grows with queues (else the median TTFT
was eight times higher: docs/router.md). In decode a prefix only saves memory and a transfer: weight
1. As in SGLang, matches below `cache_threshold` are ignored; beyond both balance thresholds only
load decides.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from router.choice.policies import (
    DRAWN,
    SCANNED,
    LoadKey,
    Placement,
    Policy,
    RoutingHints,
    few_of,
    least_loaded,
    load_key,
)
from router.choice.prefix_index import PrefixIndex, PrefixMatch
from router.config import ChoiceFlags
from router.pool.worker import Pool, Role, Worker, worker_id_of
from service.kv_events import BLOCK_TOKENS

RECOMPUTE_WEIGHT = 4


@dataclass(eq=False)
class CacheAware(Policy):
    index: PrefixIndex
    flags: ChoiceFlags

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        matched = self.index.match(hints.keys)
        workers = self._few(pool, matched, hints, DRAWN)
        worker = self._soonest(workers, matched, hints)
        return Placement(worker, cached_of(matched, worker, hints))

    def some(self, pool: Pool, hints: RoutingHints) -> list[Placement]:
        matched = self.index.match(hints.keys)
        workers = self._few(pool, matched, hints, SCANNED - DRAWN)
        return [Placement(worker, cached_of(matched, worker, hints)) for worker in workers]

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        if hints.keys:
            self.index.touch(choice.worker.worker_id, hints.keys)

    def _few(self, pool: Pool, matched: PrefixMatch, hints: RoutingHints, count: int) -> Pool:
        """Return the pool; of a large one `count` random workers and `DRAWN` longest matches."""
        few = few_of(pool, self.draw, count)
        if len(pool) <= SCANNED or not matched.groups:
            return few
        return sorted({*few, *islice(self._holders(pool, matched, hints), DRAWN)}, key=worker_id_of)

    def _holders(self, pool: Pool, matched: PrefixMatch, hints: RoutingHints) -> Iterator[Worker]:
        """Yield workers above `cache_threshold`, longest match first."""
        start = self.draw(matched.num_places)
        worthy = [bits for depth, bits in reversed(matched.groups) if self._is_worthy(depth, hints)]
        ids = (worker_id for bits in worthy for worker_id in matched.ids(bits, start))
        for worker_id in islice(ids, SCANNED):
            at = bisect_left(pool, worker_id, key=worker_id_of)
            if at < len(pool) and pool[at].worker_id == worker_id:
                yield pool[at]

    def _is_worthy(self, depth: int, hints: RoutingHints) -> bool:
        return depth * BLOCK_TOKENS >= self.flags.cache_threshold * hints.prompt_tokens

    def _soonest(self, workers: Pool, matched: PrefixMatch, hints: RoutingHints) -> Worker:
        queues = [worker.inflight_requests for worker in workers]
        shortest = min(queues)
        if not matched.groups or unbalanced(shortest, max(queues), self.flags):
            return least_loaded(workers)
        weight = 1 if workers[0].role is Role.DECODE else 1 + RECOMPUTE_WEIGHT * shortest
        worths = {  # tokens of wait that offset the match, by id
            worker_id: weight * depth * BLOCK_TOKENS
            for depth, bits in matched.groups
            if self._is_worthy(depth, hints)
            for worker_id in matched.ids(bits)
        }

        def cost(worker: Worker) -> LoadKey:
            key = load_key(worker)
            return (key[0] - worths.get(worker.worker_id, 0), *key[1:])

        return min(workers, key=cost)


def unbalanced(shortest: int, longest: int, flags: ChoiceFlags) -> bool:
    return longest - shortest > flags.balance_abs_threshold and longest > flags.balance_rel_threshold * shortest


def cached_of(matched: PrefixMatch, worker: Worker, hints: RoutingHints) -> int:
    """Cached tokens of the prompt; the last token is always computed."""
    return max(0, min(matched.depth(worker.worker_id) * BLOCK_TOKENS, hints.prompt_tokens - 1))
