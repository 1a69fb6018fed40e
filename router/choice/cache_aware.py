"""The cache-aware policy: a prompt goes where it is computed soonest, counting what is cached of it. Pure.

    cost(worker) = tokens that wait there to be computed - weight * tokens of the prompt that it has cached
    weight       = 1 + RECOMPUTE_WEIGHT * requests at the worker that has the fewest (prefill and unified workers)

The least cost wins. On an idle worker a prefix is computed again at no cost to others; where all have queues that delays every request
behind it, so the weight grows with the queues (docs/router.md: on the Mooncake traces at twice their rate the median first token came
eight times later without; between 1 and 16 the constant makes little difference). Decode does not compute prompts: a prefix cached
there spares memory and a transfer, so its weight is 1. SGLang's thresholds apply: a match below
`cache_threshold` of the prompt is none, and beyond both balance thresholds the load alone decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from router.choice.policies import Placement, Policy, RoutingHints
from router.choice.prefix_index import PrefixIndex, PrefixMatch
from router.config import ChoiceFlags
from router.pool.load_order import LoadKey, load_key
from router.pool.pool import Candidates, NoneInTime
from router.pool.worker import Role, Worker
from service.prefix_chain import BLOCK_TOKENS

RECOMPUTE_WEIGHT = 4
SMALL_GROUP = 16  # workers with equally much cached: up to this many are compared one by one


@dataclass(frozen=True, slots=True)
class CacheAware(Policy):
    """`index` is this policy's own; KV events may feed it, too."""

    index: PrefixIndex
    flags: ChoiceFlags

    def look(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        matched = self.index.match(hints.keys)
        worker = self._soonest(candidates, hints, matched)
        return Placement(worker, cached_of(matched, worker, hints))

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        if hints.keys:
            self.index.touch(choice.worker.worker_id, hints.keys)

    def _soonest(self, candidates: Candidates, hints: RoutingHints, matched: PrefixMatch) -> Worker:
        if not matched.groups:
            return candidates.least_loaded()
        shortest, longest = candidates.queue_ends()
        if not unbalanced(shortest, longest, self.flags):
            weight = 1 if candidates.role is Role.DECODE else 1 + RECOMPUTE_WEIGHT * shortest
            return _least_cost(candidates, self._groups(matched, hints, weight), matched)
        if candidates.by_cache:
            return _least_cost(candidates, self._groups(matched, hints, 0), matched)
        return candidates.least_loaded()

    def _groups(self, matched: PrefixMatch, hints: RoutingHints, weight: int) -> Sequence["_Group"]:
        """Group the workers by the length of their match. A match below the threshold has no worth."""
        least = self.flags.cache_threshold * hints.prompt_tokens
        groups = []
        for depth, bits in matched.groups:
            tokens = depth * BLOCK_TOKENS
            worth = weight * tokens if tokens >= least else 0
            groups.append(_Group(worth, max(0, min(tokens, hints.prompt_tokens - 1)), bits))
        return groups


class _Group(NamedTuple):
    """Workers with equally much cached. `worth`: of that, in tokens of wait; `bits`: of the index."""

    worth: int
    cached_tokens: int
    bits: int


def _least_cost(pool: Candidates, groups: Sequence[_Group], matched: PrefixMatch) -> Worker:
    """The best of the least loaded of all and of each group. `NoneInTime`."""
    best = next(pool.in_order(), None)
    best_key = None if best is None else _cost_key(best, 0)
    for group in groups:
        if not group.worth and not pool.by_cache:
            continue
        worker = _first_of(pool, group, matched, math.inf if best_key is None else best_key[0])
        if worker is not None and (best_key is None or _cost_key(worker, group.worth) < best_key):
            best, best_key = worker, _cost_key(worker, group.worth)
    if best is None:
        raise NoneInTime
    return best


def _first_of(pool: Candidates, group: _Group, matched: PrefixMatch, best_cost: float) -> Worker | None:
    """The least loaded of a group; None if it costs more than `best_cost`.

    Of a large group one comes soon in the order of load, unless its workers are the busy ones: no more are walked past than it has.
    """
    cached_tokens, size = group.cached_tokens, group.bits.bit_count()
    if size > SMALL_GROUP:
        for worker in islice(pool.in_order(cached_tokens=cached_tokens), size):
            if worker.load_tokens - group.worth > best_cost:
                return None
            if matched.has(worker.worker_id, group.bits):
                return worker
    members = [pool.member(worker_id, cached_tokens=cached_tokens) for worker_id in matched.ids(group.bits)]
    return min(filter(None, members), key=load_key, default=None)


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
