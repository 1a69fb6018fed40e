"""Conversations replayed through the policies, to workers that compute one prompt after the other and cache its blocks."""

import random
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from router.choice.policies import (
    CacheAware,
    ConsistentHashing,
    LeastLoad,
    Policy,
    PowerOfTwo,
    Random,
    RoundRobin,
    RoutingHints,
    cost_tokens,
)
from router.choice.prefix_index import PrefixIndex
from router.config import ChoiceFlags
from router.pool.worker import Lease, LoadReport, Role
from service.kv_events import BLOCK_TOKENS
from tests.router.dummies import table_of

KEYS = 4  # of a block
TOKENS = KEYS * BLOCK_TOKENS
CACHED_BLOCKS, TOKENS_PER_S, OVERHEAD_S, NUM_WORKERS = 390, 8000.0, 0.02, 4


class Turn(NamedTuple):
    """`blocks`: names of the prompt's blocks."""

    at_s: float
    tokens: int
    blocks: list[int]

    def keys(self) -> list[bytes]:
        return [key for block in self.blocks for key in keys_of(block)][: self.tokens // BLOCK_TOKENS]


def keys_of(block: int) -> list[bytes]:
    return [b"%d.%d" % (block, part) for part in range(KEYS)]


def conversations() -> list[Turn]:
    """Each prompt is the one before and more; all begin with the same system prompt."""
    rng, names, turns = random.Random(5), count(1), []
    for _ in range(13):
        begin_s, blocks = rng.randrange(30), [0]
        for turn in range(5):
            blocks = [*blocks, *(next(names) for _ in range(rng.randrange(2, 12)))]
            at_s = begin_s + 12 * turn + 9 * rng.random()
            turns.append(Turn(at_s, len(blocks) * TOKENS - rng.randrange(TOKENS), blocks))
    return sorted(turns)


class Cache(OrderedDict[int, None]):
    """Blocks of a worker, the least recently used first; the last block of a prompt goes before its first."""

    def use(self, blocks: list[int]) -> tuple[int, list[int], list[int]]:
        """(how many leading ones were there, those stored now, those that had to go)."""
        hits = next((i for i, block in enumerate(blocks) if block not in self), len(blocks))
        for block in reversed(blocks):
            self[block] = None
            self.move_to_end(block)
        return hits, blocks[hits:], [self.popitem(last=False)[0] for _ in range(len(self) - CACHED_BLOCKS)]


def draw() -> Callable[[int], int]:
    return random.Random(1).randrange


POLICIES: dict[str, Callable[[PrefixIndex], Policy]] = {
    "random": lambda index: Random(draw()),
    "round_robin": lambda index: RoundRobin(draw()),
    "power_of_two": lambda index: PowerOfTwo(draw()),
    "least_load": lambda index: LeastLoad(draw()),
    "consistent_hashing": lambda index: ConsistentHashing(draw()),
    "cache_aware": lambda index: CacheAware(draw(), index, ChoiceFlags()),
    "cache_aware, KV events": lambda index: CacheAware(draw(), index, ChoiceFlags()),
}


class Result(NamedTuple):
    """`ttft_s`, `queued`: of a slow request: the time to its first token, the tokens of the longest queue."""

    hit_rate: float
    ttft_s: float
    queued: int


def replay(name: str) -> Result:
    index, table = PrefixIndex(max_blocks=1 << 17), table_of(NUM_WORKERS, role=Role.PREFILL)
    policy, tells = POLICIES[name](index), name.endswith("KV events")
    caches, free_s, queued = [Cache() for _ in range(NUM_WORKERS)], [0.0] * NUM_WORKERS, [0] * NUM_WORKERS
    later: list[tuple[float, int, Callable[[], None]]] = []
    ttft_s, longest, numbers, total, found = list[float](), list[int](), count(), 0, 0

    def report(at_s: float) -> None:
        for worker, tokens in zip(table.workers(), queued, strict=True):
            table.loads.on_report(worker, LoadReport(waiting_tokens=tokens))
        heappush(later, (at_s + 1.0, next(numbers), lambda: report(at_s + 1.0)))

    report(0.0)
    for turn in conversations():
        while later[0][0] <= turn.at_s:
            heappop(later)[2]()
        ask = RoutingHints(prompt_tokens=turn.tokens, keys=turn.keys(), session=str(turn.blocks[1]))
        choice = policy.choose(table.workers(), ask)
        at, lease = choice.worker.worker_id, table.loads.charge(choice.worker, cost_tokens(choice, ask))
        hits, stored, gone = caches[at].use(turn.blocks)
        todo = turn.tokens - min(hits * TOKENS, turn.tokens - 1)
        free_s[at] = max(free_s[at], turn.at_s) + OVERHEAD_S + todo / TOKENS_PER_S
        queued[at] += todo
        ttft_s.append(free_s[at] - turn.at_s)
        longest.append(max(queued))
        total, found = total + turn.tokens, found + turn.tokens - todo

        def end(
            at: int = at, todo: int = todo, moved: tuple[list[int], list[int]] = (stored, gone), lease: Lease = lease
        ) -> None:
            table.loads.release(lease)
            queued[at] -= todo
            for blocks, tell in zip(moved, (index.store_all, index.remove_all), strict=True) if tells else ():
                tell(at, [key for block in blocks for key in keys_of(block)])

        heappush(later, (free_s[at], next(numbers), end))
    return Result(found / total, sorted(ttft_s)[-1], sorted(longest)[-1])


def test_the_policies_differ_as_they_should() -> None:
    results = {name: replay(name) for name in POLICIES}
    aware = [results[name] for name in ("cache_aware", "cache_aware, KV events", "consistent_hashing")]
    blind = [results[name] for name in ("random", "round_robin", "power_of_two", "least_load")]
    assert min(result.hit_rate for result in aware) > 1.5 * max(result.hit_rate for result in blind)
    assert results["cache_aware"].ttft_s <= min(result.ttft_s for result in blind)
    assert results["least_load"].queued <= results["random"].queued
    assert results == {name: replay(name) for name in POLICIES}
