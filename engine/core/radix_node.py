"""Nodes of the prefix tree, and the order in which its leaves are evicted."""

import heapq


class Node:
    """`key`: the tokens of this edge; `pages`: one per page_size tokens. A branch has no pages, and -adapter for a key."""

    __slots__ = ("children", "key", "keys", "last_used", "locks", "noted", "pages", "parent", "serial", "uses")

    def __init__(self, *, key: tuple[int, ...], pages: list[int], parent: "Node | None", serial: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.last_used = 0
        self.noted = -1  # the last_used under which the eviction order has it; -1: not there
        self.serial = serial
        self.keys: list[bytes] = []  # of its pages, where a tier below listens
        self.uses = 0  # that tier's: requests that computed or read it

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf, still in the tree."""
        return self.locks == 0 and not self.children and self.parent is not None


class EvictionOrder:
    """Evictable leaves, least recently used first: a heap with stale entries, which are skipped and sometimes removed."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []  # (last_used, serial, node)

    def note(self, node: Node, *, num_pages: int) -> None:
        """Enter `node` if it is an evictable leaf. `num_pages`: of the tree; it bounds the stale entries."""
        if not node.is_evictable or node.noted == node.last_used:
            return
        node.noted = node.last_used
        heapq.heappush(self._heap, (node.last_used, node.serial, node))
        if len(self._heap) > 64 + 4 * num_pages:
            self._compact()

    def pop(self) -> Node | None:
        """Take the least recently used evictable leaf, if any."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            node = entry[2]
            if _is_current(entry):
                return node
            if node.noted == entry[0]:
                node.noted = -1
        return None

    def serials(self) -> set[int]:
        """Return the serials of the nodes that `pop` would find."""
        return {entry[1] for entry in self._heap if _is_current(entry)}

    def _compact(self) -> None:
        stale = [entry[2] for entry in self._heap if not _is_current(entry)]
        self._heap = [entry for entry in self._heap if _is_current(entry)]
        heapq.heapify(self._heap)
        for node in stale:
            if not node.is_evictable:
                node.noted = -1


def _is_current(entry: tuple[int, int, Node]) -> bool:
    return entry[2].is_evictable and entry[2].last_used == entry[0]
