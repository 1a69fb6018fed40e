"""Prefixes of requests that wait, loaded from the host before their turn: then the bus works while others compute.

What is loaded ahead are evictable pages of the tree. So free + evictable, by which admission and growth go, stays the same, and
at most half of that is for requests that wait: no request lacks a page because of it. It evicts nothing that a running request
reads or one before it in the queue would find. Nobody owns it: a request that is aborted leaves it to the tree.

A page is loaded ahead once for a request. If it is gone when its turn comes, admission loads it.
"""

from collections.abc import Callable

from engine.core.memory import Memory
from engine.core.memory_part import LowerTier
from engine.core.request import Request
from engine.core.state import SchedulerState

MOST_REQUESTS = 8  # from the front of the queue: bounds the cost of a plan
SHARE = 2  # 1 / SHARE of the pages that can be taken is for requests that wait

InOrder = Callable[[float], list[Request]]  # (time) -> those that wait, in the order of admission


class LoadAhead:
    def __init__(self, state: SchedulerState, *, in_order: InOrder) -> None:
        self._memory: Memory = state.memory
        self._tier = state.memory.of(LowerTier)
        self._stages = state.stages
        self._counters = state.counters
        self._in_order = in_order
        self._done: object = None  # the queue and the host as they were when nothing was left to load

    def plan(self, now_s: float) -> None:
        """Request loads for the next step, as many as one may carry."""
        tier = self._tier
        if not tier.pages_ahead_left or not self._stages.waiting:
            return
        now = (self._counters.requests, len(self._stages.waiting), tier.files_come)
        if now == self._done:
            return
        queue = self._in_order(now_s)[:MOST_REQUESTS]
        for i, request in enumerate(queue):
            room = self._memory.available // SHARE - sum(r.lower_tiers.ahead.num_pages for r in queue)
            tier.load_ahead(request, self._memory, earlier=queue[:i], most=min(room, tier.pages_ahead_left))
            if not tier.pages_ahead_left:
                return  # the next step goes on
        self._done = now
