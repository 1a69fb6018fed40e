"""Replays a trace through the router's policies and simple workers (trace_workers.py): what is cached where prompts go, how even the load.

"longest prefix" is the rule of SGLang's router with its default thresholds, written here to compare with: the longest match if it is longer
than 0.3 of the prompt, else the worker with the smallest tree; the shortest queue while queues are unequal by more than
64 requests and 1.5 times.
"""

import random
from collections.abc import Callable, Sequence

from router.choice.cache_aware import CacheAware, cached_of, unbalanced
from router.choice.policies import (
    ConsistentHashing,
    Draw,
    LeastLoad,
    Placement,
    Policy,
    PowerOfTwo,
    Random,
    RoundRobin,
    RoutingHints,
)
from router.choice.prefix_index import PrefixIndex
from router.config import ChoiceFlags
from router.pool.worker import Pool
from tests.router.trace_workers import PrefillModel, TraceRequest, replay_prefill

TREE_BLOCKS = (1 << 26) // 512  # --max-tree-size
SEED = 1


class LongestPrefix:
    """SGLang's rule, see above."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._settings = ChoiceFlags()

    def choose(self, candidates: Pool, ask: RoutingHints) -> Placement:
        matched = self._index.match(ask.keys)
        best = max(candidates, key=lambda w: matched.depth(w.worker_id))
        queues = [worker.inflight_requests for worker in candidates]
        if unbalanced(min(queues), max(queues), self._settings):
            best = min(candidates, key=lambda w: w.inflight_requests)
        elif cached_of(matched, best, ask) <= self._settings.cache_threshold * ask.prompt_tokens:
            best = min(candidates, key=lambda w: self._index.num_blocks(w.worker_id))
        self._index.touch(best.worker_id, ask.keys)
        return Placement(best, cached_of(matched, best, ask))


def _draw() -> Draw:
    return random.Random(SEED).randrange


PREFILL: dict[str, Callable[[PrefixIndex], Policy]] = {
    "random": lambda index: Random(_draw()),
    "round_robin": lambda index: RoundRobin(_draw()),
    "power_of_two": lambda index: PowerOfTwo(_draw()),
    "least_load": lambda index: LeastLoad(_draw()),
    "consistent_hashing": lambda index: ConsistentHashing(_draw()),
    "longest prefix": LongestPrefix,
    "cache_aware": lambda index: CacheAware(_draw(), index, ChoiceFlags()),
    "cache_aware, KV events": lambda index: CacheAware(_draw(), index, ChoiceFlags()),
}


def prefill_row(name: str, trace: list[TraceRequest], model: PrefillModel) -> dict[str, float]:
    """One policy of `PREFILL` over one trace."""
    index = PrefixIndex(max_blocks=TREE_BLOCKS)
    events = name.endswith("KV events")
    model = PrefillModel(num_workers=model.num_workers, cache_tokens=model.cache_tokens, events=events)
    result = replay_prefill(trace, PREFILL[name](index), model, index=index)
    return {
        "hit_rate": result.hit_rate,
        "spread": result.spread,
        "queue_tokens_p99": _quantile(result.queue_tokens, 0.99),
        "ttft_p50_s": _quantile(result.ttft_s, 0.5),
        "ttft_p99_s": _quantile(result.ttft_s, 0.99),
    }


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
