"""Deferral of prompts whose beginning another request computes.

The tree gets pages after their step: simultaneous requests would each compute a common prefix. Like
SGLang's in-batch prefix caching, for any policy.
"""

from collections.abc import Iterable

from engine.core.memory import Memory, match_limit
from engine.core.radix_node import Branch
from engine.core.request import Request

MAX_PASSED_OVER = 32  # per step: bounds a plan's cost


class SharedWork:
    """Prefixes being computed; a prompt waits for at least `min_tokens` shared ones."""

    def __init__(self, memory: Memory, computing: Iterable[Request], *, min_tokens: int) -> None:
        self._memory = memory
        self._min_tokens = min_tokens
        self._page_size = memory.allocator.page_size
        self._under_way: dict[tuple[Branch, tuple[int, ...]], list[Request]] = {}  # by first page
        self.num_passed_over = 0
        for request in computing:
            self.add(request)

    def add(self, request: Request) -> None:
        if (
            self._memory.cache.enabled
            and request.keep_kv
            and request.launched_len - request.computed_len >= self._min_tokens
        ):
            self._under_way.setdefault(self._first_page(request), []).append(request)

    @property
    def exhausted(self) -> bool:
        return self.num_passed_over >= MAX_PASSED_OVER

    def passes_over(self, request: Request) -> bool:
        others = self._under_way.get(self._first_page(request)) if self._under_way else None
        if not others or request.saved_len > 0:
            return False
        limit = match_limit(request)
        shared = max(self._common(request, other, min(limit, other.launched_len)) for other in others)
        if shared < self._min_tokens:
            return False
        cached = self._memory.cache.num_cached(request.key_tokens(0, limit), branch=request.branch) * self._page_size
        waits = shared - cached >= self._min_tokens
        self.num_passed_over += waits
        return waits

    def _first_page(self, request: Request) -> tuple[Branch, tuple[int, ...]]:
        return request.branch, tuple(request.key_tokens(0, min(self._page_size, request.num_tokens)))

    def _common(self, request: Request, other: Request, limit: int) -> int:
        size = self._page_size
        ours, theirs = request.key_tokens(0, limit), other.key_tokens(0, min(limit, other.num_tokens))
        low, high = 0, len(theirs) // size
        while low < high:
            middle = (low + high + 1) // 2
            if ours[low * size : middle * size] == theirs[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low * size
