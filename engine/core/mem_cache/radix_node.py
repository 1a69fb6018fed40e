"""Prefix tree nodes."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

Rank = tuple[int, int]


class Branch(NamedTuple):
    """Prefix identity besides tokens: adapter load (0: base model), and namespace."""

    adapter: int = 0
    namespace: tuple[str, ...] = ()


TRUNK = Branch()


class Node:
    """Edge tokens `key`, a page per page_size tokens; branch tops have only `branch`."""

    __slots__ = (
        "branch",
        "children",
        "created",
        "key",
        "keys",
        "last_used",
        "locks",
        "noted",
        "pages",
        "parent",
        "priority",
        "serial",
        "state",
        "uses",
        "window",
    )

    def __init__(
        self,
        *,
        key: tuple[int, ...],
        pages: list[int],
        parent: "Node | None",
        serial: int,
        branch: Branch | None = None,
    ) -> None:
        self.branch = branch
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.created = self.last_used = 0  # by the tree's clock
        self.noted: Rank | None = None  # its rank in the eviction order
        self.serial = serial
        self.keys: list[bytes] = []  # of pages, for lower tiers
        self.uses = 1  # by requests that computed or read it
        self.priority = 0  # the highest of these requests
        self.window: list[int] = []  # parallel to `pages`, 0 if missing (engine/core/mem_cache/window_pages.py)
        self.state = 0  # recurrent state slot at the node's end (engine/core/mem_cache/state_slots.py)

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf in the tree."""
        return self.locks == 0 and not self.children and self.parent is not None


class TreePart:
    """Base of tree followers, with empty hooks."""

    def on_stored(self, node: Node) -> None:
        """Note a new leaf."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """Move the first pages' data from `lower` to `upper`."""

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        """Note a removed leaf. `evicted`: False if all nodes are dropped."""

    def on_cleared(self) -> None:
        """Note that all nodes are gone, each removed without eviction."""

    def check_node(self, node: Node) -> None:
        """Raise AssertionError unless `node` has its data of this part."""


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
    """Eviction order of prefix tree leaves (--radix-eviction-policy), as in SGLang.

    lru       least recently used first        mru   most recently used first
    lfu       fewest requests first            fifo  oldest first
    priority  lowest priority first            filo  newest first

    Ties go by LRU. The top of an emptied branch goes first. A heap, whose stale entries are removed
    lazily: a rank may change while locked, or before `note`.
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
