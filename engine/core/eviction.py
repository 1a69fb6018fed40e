"""Eviction order of prefix tree leaves (--radix-eviction-policy), as in SGLang.

lru       least recently used first        mru   most recently used first
lfu       fewest requests first            fifo  oldest first
priority  lowest priority first            filo  newest first

Ties go by LRU. The top of an emptied branch goes first.
"""

import heapq
from collections.abc import Callable

from engine.core.radix_node import Node, Rank

_RANKS: dict[str, Callable[[Node], Rank]] = {
    "lru": lambda node: (node.last_used, 0),
    "lfu": lambda node: (node.uses, node.last_used),
    "fifo": lambda node: (node.created, 0),
    "mru": lambda node: (-node.last_used, 0),
    "filo": lambda node: (-node.created, 0),
    "priority": lambda node: (node.priority, node.last_used),
}
EVICTION_POLICIES = tuple(_RANKS)
_FIRST = (-(1 << 62), 0)


class EvictionOrder:
    """Heap of evictable leaves with stale entries, removed lazily.

    A rank may change while locked, or before `note`.
    """

    def __init__(self, policy: str) -> None:
        self._rank_of_pages = _RANKS[policy]
        self._heap: list[tuple[Rank, int, Node]] = []  # (rank, serial, node)

    def note(self, node: Node, *, num_pages: int) -> None:
        """Add an evictable leaf; `num_pages` bounds stale entries."""
        if not node.is_evictable or node.noted == (rank := self._rank(node)):
            return
        node.noted = rank
        heapq.heappush(self._heap, (rank, node.serial, node))
        if len(self._heap) > 64 + 4 * num_pages:
            self._compact()

    def pop(self) -> Node | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            node = entry[2]
            if self._is_current(entry):
                return node
            if node.noted == entry[0]:
                node.noted = None
        return None

    def serials(self) -> set[int]:
        return {serial for rank, serial, node in self._heap if node.is_evictable and self._rank(node) == rank}

    def _rank(self, node: Node) -> Rank:
        return self._rank_of_pages(node) if node.pages else _FIRST

    def _compact(self) -> None:
        stale = [entry[2] for entry in self._heap if not self._is_current(entry)]
        self._heap = [entry for entry in self._heap if self._is_current(entry)]
        heapq.heapify(self._heap)
        for node in stale:
            if not node.is_evictable:
                node.noted = None

    def _is_current(self, entry: tuple[Rank, int, Node]) -> bool:
        return entry[2].is_evictable and self._rank(entry[2]) == entry[0]
