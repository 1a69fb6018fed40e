"""Which token prefixes have their KV in pages: a radix tree whose edges are whole pages.

Owns the nodes, their pages and their locks. A node's lock count is at least each child's, so an unlocked node has only
unlocked nodes below it and everything unlocked can be evicted leaf by leaf, least recently used first.

KV that other weights made is no prefix of ours: each adapter (by the number of its load, engine/core/adapters.py) has a
*branch* of its own under the root, a node without pages whose key (-adapter,) no token can be. Adapter 0 is the model alone.

The idea is SGLang's RadixAttention (arXiv:2312.07104); page-aligned matching as there with page_size > 1.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.page_allocator import PageAllocator


class Node:
    """`key`: the tokens of this edge, a multiple of page_size long; `pages`: one per page_size tokens of the key.

    A branch has no pages, and the number of its adapter for a key.
    """

    __slots__ = ("children", "key", "keys", "last_used", "locks", "noted", "pages", "parent", "serial", "uses")

    def __init__(self, *, key: tuple[int, ...], pages: list[int], parent: "Node | None", serial: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.last_used = 0
        self.noted = -1  # the last_used under which the eviction heap has it; -1: not there
        self.serial = serial
        self.keys: list[bytes] = []  # of its pages, where a tier below listens
        self.uses = 0  # that tier's: requests that computed or read it


@dataclass(slots=True, frozen=True)
class Match:
    """The longest cached prefix. `node` is where it ends: lock it before anything else may evict."""

    pages: list[int]
    node: Node


@dataclass(slots=True, frozen=True)
class Inserted:
    """`node` covers the inserted prefix; its first `existing` pages were in the tree before (the caller's copies

    of those are duplicates and stay the caller's), the rest now belongs to the tree.
    """

    existing: int
    node: Node


class Below(Protocol):
    """A tier that keeps what the tree forgets. Told before a leaf's pages are free, and after they are cached."""

    def on_cached(self, node: Node) -> None: ...

    def on_evict(self, node: Node) -> None: ...


class Listener(Protocol):
    """Told of what is cached and what no longer is (engine/core/cache_events.py). `on_stored`: a new leaf."""

    def on_stored(self, node: Node) -> None: ...

    def on_removed(self, node: Node) -> None: ...

    def on_cleared(self) -> None: ...


class RadixCache:
    """With `enabled=False` nothing is ever found or kept: the same code path, an empty tree."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        enabled: bool = True,
        below: Below | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.enabled = enabled
        self._below = below
        self._listener = listener
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._serial = 0
        self._clock = 0
        self._root = Node(key=(), pages=[], parent=None, serial=0)
        self._root.locks = 1
        self._leaves: list[tuple[int, int, Node]] = []  # lazy heap of (last_used, serial, node) that may be evictable
        self.num_pages = 0
        self.num_evictable = 0

    @property
    def root(self) -> Node:
        return self._root

    def match(self, tokens: Sequence[int], *, adapter: int = 0) -> Match:
        """Longest page-aligned prefix of `tokens` in the tree. Splits a node where the match ends inside it."""
        node = self._branch(adapter) if self.enabled else None
        if node is None:
            return Match([], self._root)
        pages = list[int]()
        self._clock += 1
        for child, shared in self._walk(tokens, node):
            node = self._split(child, shared) if shared < len(child.pages) else child
            node.last_used = self._clock
            pages.extend(node.pages)
        self._note_leaf(node)
        return Match(pages, node)

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], keys: Sequence[bytes] = (), *, adapter: int = 0
    ) -> Inserted:
        """Make `tokens` findable; `len(tokens) == len(pages) * page_size`, pages held by the caller.

        `keys`: what the tier below calls these pages, where there is one.
        """
        assert len(tokens) == len(pages) * self._page_size
        if not self.enabled:
            return Inserted(existing=len(pages), node=self._root)
        if self._branch(adapter) is None:
            self._new_node((-adapter,), [], self._root)
        match = self.match(tokens, adapter=adapter)
        existing = len(match.pages)
        if existing == len(pages):
            return Inserted(existing=existing, node=match.node)
        self._allocator.to_cache(pages[existing:])
        key = tuple(tokens[existing * self._page_size :])
        leaf = self._new_node(key, list(pages[existing:]), match.node)
        leaf.last_used = self._clock
        self.num_pages += len(leaf.pages)
        self.num_evictable += len(leaf.pages)
        self._note_leaf(leaf)
        if self._below is not None:
            leaf.keys = list(keys[existing:])
            self._below.on_cached(leaf)
        if self._listener is not None:
            self._listener.on_stored(leaf)
        return Inserted(existing=existing, node=leaf)

    def lock(self, node: Node) -> None:
        """No node on the path to `node` is evicted until as many `unlock`s."""
        while node.parent is not None:
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            assert node.locks > 0, "unlock without lock"
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += len(node.pages)
                self._note_leaf(node)
            node = node.parent

    def evict(self, n: int) -> int:
        """Free at least `n` pages if that many are evictable; returns how many were freed."""
        freed = 0
        while freed < n and self._leaves:
            entry = heapq.heappop(self._leaves)
            node = entry[2]
            if self._current(entry):
                freed += self._remove(node)
            elif node.noted == entry[0]:
                node.noted = -1
        return freed

    def forget(self, adapter: int) -> None:
        """`adapter` is gone: free its branch, but for what is locked (that is evicted in its time, and never matched)."""
        branch = self._branch(adapter)
        if branch is None or branch is self._root:
            return
        for node in reversed(list(self._nodes(branch))):  # children after parents, so reversed leaves come first
            if self._evictable_leaf(node):
                self._remove(node)

    def flush(self) -> None:
        """Drop everything; only legal while nothing is locked."""
        assert self.num_evictable == self.num_pages, "flush with locked nodes"
        below, self._below = self._below, None
        listener, self._listener = self._listener, None
        self.evict(self.num_pages)
        for branch in list(self._root.children.values()):
            self._remove(branch)  # empty now
        self._below, self._listener = below, listener
        if listener is not None:
            listener.on_cleared()

    # ---- inside

    def _branch(self, adapter: int) -> Node | None:
        """Where the prefixes of `adapter` begin."""
        return self._root.children.get((-adapter,)) if adapter else self._root

    def _walk(self, tokens: Sequence[int], node: Node) -> Iterator[tuple[Node, int]]:
        """(child, pages of its key that agree) along the path from `node`, ending at the first partial one."""
        size, at = self._page_size, 0
        while child := node.children.get(tuple(tokens[at : at + size])):
            shared, whole, end = self._shared_pages(child.key, tokens, at), len(child.pages), at + len(child.key)
            yield child, shared  # the caller may split `child`
            if shared < whole:
                return
            node, at = child, end

    def _shared_pages(self, key: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
        """How many leading pages of `key` equal tokens[at:]; slices compare in C, halving finds the first difference."""
        part = tuple(tokens[at : at + len(key)])
        if part == key:
            return len(key) // self._page_size
        low, high = 0, len(part) // self._page_size  # pages [0, low) agree; the answer is in [low, high]
        while low < high:
            middle = (low + high + 1) // 2
            cut = slice(low * self._page_size, middle * self._page_size)
            if part[cut] == key[cut]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages` pages; returns the new upper part."""
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        cut, parent = num_pages * self._page_size, node.parent
        upper = self._new_node(node.key[:cut], node.pages[:num_pages], parent)
        upper.locks, upper.last_used, upper.uses = node.locks, node.last_used, node.uses
        upper.keys, node.keys = node.keys[:num_pages], node.keys[num_pages:]
        node.key, node.pages, node.parent = node.key[cut:], node.pages[num_pages:], upper
        upper.children[node.key[: self._page_size]] = node
        return upper

    def _new_node(self, key: tuple[int, ...], pages: list[int], parent: Node) -> Node:
        self._serial += 1
        node = Node(key=key, pages=pages, parent=parent, serial=self._serial)
        parent.children[key[: self._page_size]] = node
        return node

    def _remove(self, node: Node) -> int:
        assert node.parent is not None
        del node.parent.children[node.key[: self._page_size]]
        if self._below is not None:
            self._below.on_evict(node)
        if self._listener is not None:
            self._listener.on_removed(node)
        self._allocator.evict(node.pages)
        self.num_pages -= len(node.pages)
        self.num_evictable -= len(node.pages)
        self._note_leaf(node.parent)
        parent, node.parent = node.parent, None
        assert parent is not None
        return len(node.pages)

    def _evictable_leaf(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _note_leaf(self, node: Node) -> None:
        """Put `node` into the eviction heap, once per last_used, and keep stale entries below a constant factor."""
        if not self._evictable_leaf(node) or node.noted == node.last_used:
            return
        node.noted = node.last_used
        heapq.heappush(self._leaves, (node.last_used, node.serial, node))
        if len(self._leaves) > 64 + 4 * self.num_pages:
            self._compact()

    def _compact(self) -> None:
        stale = [entry[2] for entry in self._leaves if not self._current(entry)]
        self._leaves = [entry for entry in self._leaves if self._current(entry)]
        heapq.heapify(self._leaves)
        for node in stale:
            if not self._evictable_leaf(node):
                node.noted = -1

    def _current(self, entry: tuple[int, int, Node]) -> bool:
        return self._evictable_leaf(entry[2]) and entry[2].last_used == entry[0]

    def _nodes(self, *tops: Node) -> Iterator[Node]:
        """`tops` and what is below them (default: all but the root), parents before children."""
        stack = list(tops or self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Counters, locks, keys and page states agree; every evictable leaf can be found for eviction."""
        noted = {entry[2].serial for entry in self._leaves if self._current(entry)}
        pages = evictable = 0
        for node in self._nodes():
            assert len(node.keys) == (0 if self._below is None else len(node.pages))
            if node.pages:
                assert len(node.key) == len(node.pages) * self._page_size
            else:
                assert node.parent is self._root and len(node.key) == 1 and node.key[0] < 0, "an empty node"
            assert node.parent is not None and node.parent.children[node.key[: self._page_size]] is node
            assert node.locks >= max((c.locks for c in node.children.values()), default=0)
            assert all(self._allocator.state_of(p) == "cached" for p in node.pages)
            assert not self._evictable_leaf(node) or node.serial in noted
            pages += len(node.pages)
            evictable += len(node.pages) if node.locks == 0 else 0
        assert (pages, evictable) == (self.num_pages, self.num_evictable)
        assert pages == self._allocator.counts()["cached"]
