"""Admission order of waiting requests: SGLang's policies, with our priority aging.

  fcfs        first come, first served
  lpm         longest cached prefix first; fcfs for long queues, where matching would cost more
  dfs-weight  depth first through the prefix tree, heaviest branch first, to group prefixes
  lof         longest output first
  random      in random order

Cache-aware policies (lpm, dfs-weight) put requests with an earlier one's uncached prefix last;
prefill_planning.py decides if they wait. Priorities precede the policy.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.core.mem_cache.radix_cache import Branch, Match, Node
from engine.core.request import Request

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
CACHE_AWARE = ("lpm", "dfs-weight")
LPM_MAX_QUEUE = 128

MatchPrefix = Callable[[Request], Match]
Uniform = Callable[[], float]  # random numbers in [0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priorities:
    """`aging_s` of waiting raise priority by 1, against starvation.

    A waiting request preempts one of lower priority by more than `preempt_threshold` and age.
    """

    enabled: bool = True
    low_first: bool = False
    aging_s: float | None = None
    preempt_threshold: int = 10

    def rank(self, request: Request) -> int:
        """Requested priority, higher first; 0 if off."""
        if not self.enabled:
            return 0
        return -request.message.priority if self.low_first else request.message.priority

    def urgency(self, request: Request, now_s: float) -> float:
        """Aged priority, higher first."""
        urgency = float(self.rank(request))
        if self.aging_s is not None:
            urgency += (now_s - request.arrived_s) // self.aging_s
        return urgency

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Compare requested priorities: age evicts nothing."""
        if not self.enabled:
            return False
        lead = 0 if self.aging_s is None else math.ceil((waiting.arrived_s - running.arrived_s) / self.aging_s)
        return self.rank(waiting) - self.rank(running) > max(self.preempt_threshold, lead)


NO_PRIORITIES = Priorities(enabled=False)


def order(
    name: str,
    waiting: Iterable[Request],
    *,
    match_prefix: MatchPrefix,
    uniform: Uniform,
    shared_tokens: int,
    priorities: Priorities = NO_PRIORITIES,
    now_s: float = 0.0,
) -> list[Request]:
    """Sort `waiting`, given by arrival, into admission order."""
    requests = list(waiting)
    if name == "lpm" and len(requests) > LPM_MAX_QUEUE:
        name = "fcfs"
    requests = _by_policy(name, requests, match_prefix, uniform, shared_tokens)
    if priorities.enabled:
        requests.sort(key=lambda r: -priorities.urgency(r, now_s))
    return requests


def _by_policy(
    name: str, requests: list[Request], match_prefix: MatchPrefix, uniform: Uniform, shared_tokens: int
) -> list[Request]:
    if name == "lof":
        return sorted(requests, key=lambda r: -r.max_new_tokens)
    if name == "random":
        numbers = [uniform() for _ in requests]
        return [requests[i] for i in sorted(range(len(requests)), key=numbers.__getitem__)]
    if name not in CACHE_AWARE:
        return requests
    matches = [match_prefix(r) for r in requests]
    cached = [len(m.pages) for m in matches]
    later = _shares_with_an_earlier_one(requests, matches, shared_tokens)
    if name == "lpm":
        ranks = sorted(range(len(requests)), key=lambda i: (later[i], -cached[i], i))
    else:
        depth_first = _depth_first(matches)
        ranks = sorted(range(len(requests)), key=lambda i: (later[i], depth_first[i]))
    return [requests[i] for i in ranks]


def _shares_with_an_earlier_one(requests: list[Request], matches: list[Match], shared_tokens: int) -> list[bool]:
    seen: set[tuple[Branch, tuple[int, ...]]] = set()
    later = []
    for request, match in zip(requests, matches, strict=True):
        prefix = (request.branch, tuple(request.key_tokens(0, min(shared_tokens, len(request.input_ids)))))
        uncached = not match.pages and len(request.input_ids) >= shared_tokens
        later.append(uncached and prefix in seen)
        seen.add(prefix)
    return later


def _depth_first(matches: list[Match]) -> list[int]:
    weight: dict[int, int] = {}
    children: dict[int, dict[int, Node]] = {}
    at: dict[int, list[int]] = {}
    root = None
    for i, match in enumerate(matches):
        at.setdefault(match.node.serial, []).append(i)
        node: Node | None = match.node
        while node is not None:
            weight[node.serial] = weight.get(node.serial, 0) + 1
            if node.parent is not None:
                children.setdefault(node.parent.serial, {})[node.serial] = node
            else:
                root = node
            node = node.parent
    ranks = [0] * len(matches)
    if root is None:
        return ranks
    stack, next_rank = [root], 0
    while stack:
        node = stack.pop()
        for i in at.get(node.serial, ()):
            ranks[i], next_rank = next_rank, next_rank + 1
        branches = children.get(node.serial, {}).values()
        stack.extend(sorted(branches, key=lambda n: (weight[n.serial], -n.serial)))
    return ranks


# ---- Budgets and switches of the scheduler, fixed at start.

TAIL_SHARE = 16
ALL_IDS = 1 << 32  # of a vocabulary that has every id


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From flags and role.

    - chunked_prefill_size: prompt tokens per step, a multiple of page_size, exceeded by last chunks
      up to `tail_tokens`; None for whole prompts, bounded by `max_prefill_tokens`
    - mixed_chunk: decodes ride in prefill steps; multiplexed: two streams (engine/pdmux)
    - resume_elsewhere: the role chooses retracted requests' KV source
    - sibling_tokens: uncached prefix shared with an earlier prompt that defers one (cache-aware)
    - min_shared_tokens: shared computation for which a prompt waits a step
    - reserve_floor: minimum of added tokens expected per decode; vocab_size: valid ids
    - test_retract: decode steps between forced retractions, 0 is off
    - grid: chunk lengths for recurrent models, by default pages
    - pp_async_batch_depth: plans more than stages
    """

    page_size: int
    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = None
    prefill_max_requests: int | None = None
    mixed_chunk: bool = False
    multiplexed: bool = False
    max_loras_per_batch: int = 0
    lora_drain_wait_s: float | None = None
    policy: str = "fcfs"
    priorities: Priorities = NO_PRIORITIES
    sibling_tokens: int = 32
    min_shared_tokens: int = 128  # about the cost of reading the weights for a few tokens
    reserve_floor: int = 0
    resume_elsewhere: bool = False
    vocab_size: int = ALL_IDS
    test_retract: int = 0
    grid: int | None = None
    pp_size: int = 1
    pp_async_batch_depth: int = 0

    @property
    def micro_batches(self) -> int:
        """Plans that share running requests; 1: each plan decodes all."""
        return 1 if self.pp_size == 1 else self.pp_size + self.pp_async_batch_depth

    @property
    def part_tokens(self) -> int:
        return self.grid or self.page_size

    @property
    def tail_tokens(self) -> int:
        """Tokens by which a last chunk may exceed the budget, cheaper than its own step."""
        return (self.chunked_prefill_size or 0) // TAIL_SHARE
