"""Early host loads for waiting requests: the bus works while others compute.

Loaded pages are evictable tree pages, at most half of free + evictable, so no request lacks pages.
They evict nothing read by running requests or found by earlier waiting ones.

Each page is loaded early once per request; if evicted, admission loads it again.
"""

from collections.abc import Callable

from engine.core.mem_cache.memory_part import LowerTier
from engine.core.memory import Memory
from engine.core.request import Request
from engine.core.state import SchedulerState

MAX_REQUESTS = 8  # from the queue's front: bounds planning cost
SHARE = 2  # 1 / SHARE of available pages is for waiting requests

InOrder = Callable[[float], list[Request]]  # (time) -> waiting requests in order of admission


class LoadAhead:
    def __init__(self, state: SchedulerState, *, in_order: InOrder) -> None:
        self._memory: Memory = state.memory
        self._tier = state.memory.of(LowerTier)
        self._stages = state.stages
        self._counters = state.counters
        self._in_order = in_order
        self._done: object = None  # queue and host state when nothing was left to load

    def plan(self, now_s: float) -> None:
        """Request loads for the next step, up to its limit."""
        tier = self._tier
        if not tier.pages_ahead_left or not self._stages.waiting:
            return
        now = (self._counters.requests, len(self._stages.waiting), tier.files_come)
        if now == self._done:
            return
        queue = self._in_order(now_s)[:MAX_REQUESTS]
        for i, request in enumerate(queue):
            room = self._memory.available // SHARE - sum(r.lower_tiers.ahead.num_pages for r in queue)
            tier.load_ahead(request, self._memory, earlier=queue[:i], most=min(room, tier.pages_ahead_left))
            if not tier.pages_ahead_left:
                return  # the next step goes on
        self._done = now
