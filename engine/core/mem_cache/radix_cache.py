"""Radix tree of token prefixes with cached KV; edges are whole pages.

Owns nodes, pages and locks. Lock counts are at least those of children, so unlocked nodes are
evicted leaf by leaf. Each adapter and namespace has a *branch*, whose top has no pages; other
prefixes start at the root.

After SGLang's RadixAttention (arXiv:2312.07104).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.mem_cache.page_allocator import PageAllocator

# ---- Prefix tree nodes.

Rank = tuple[int, int]


class Branch(NamedTuple):
    """Prefix identity besides tokens: digest of an adapter (empty: base model), and namespace."""

    variant: str = ""
    namespace: tuple[str, ...] = ()


TRUNK = Branch()


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """Edge tokens `key`, a page per page_size tokens; branch tops have only `branch`."""

    key: tuple[int, ...]
    pages: list[int]
    parent: "Node | None"
    serial: int
    branch: Branch | None = None
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    locks: int = 0
    created: int = 0  # by the tree's clock
    last_used: int = 0  # likewise
    noted: "Rank | None" = None  # its rank in the eviction order
    keys: list[bytes] = field(default_factory=list)  # of pages, for lower tiers
    uses: int = 1  # by requests that computed or read it
    priority: int = 0  # the highest of these requests
    window: list[int] = field(default_factory=list)  # parallel to `pages`, 0 if missing (window_pages.py)
    state: int = 0  # recurrent state slot at the node's end (state_slots.py)

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf in the tree."""
        return self.locks == 0 and not self.children and self.parent is not None

    def up(self) -> Iterator["Node"]:
        """The node and those above it, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


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


RANKS: dict[str, Callable[[Node], Rank]] = {
    "lru": lambda node: (node.last_used, 0),
    "lfu": lambda node: (node.uses, node.last_used),
    "fifo": lambda node: (node.created, 0),
    "mru": lambda node: (-node.last_used, 0),
    "filo": lambda node: (-node.created, 0),
    "priority": lambda node: (node.priority, node.last_used),
}
EVICTION_POLICIES = tuple(RANKS)
FIRST = (-(1 << 62), 0)


class EvictionOrder:
    """Eviction order of prefix tree leaves (--radix-eviction-policy), as in SGLang.

    lru       least recently used first        mru   most recently used first
    lfu       fewest requests first            fifo  oldest first
    priority  lowest priority first            filo  newest first

    Ties go by LRU. The top of an emptied branch goes first. A heap, whose stale entries are removed
    lazily: a rank may change while locked, before `note`, or rise.
    """

    def __init__(self, rank: Callable[[Node], Rank]) -> None:
        self._rank_of_pages = rank
        self._heap: list[tuple[Rank, int, Node]] = []  # (rank, serial, node)
        self._compact_at = 64

    def note(self, node: Node) -> None:
        """Add an evictable leaf."""
        if not node.is_evictable or node.noted == (rank := self._rank(node)):
            return
        node.noted = rank
        heapq.heappush(self._heap, (rank, node.serial, node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> Node | None:
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if node.noted != rank:
                continue
            node.noted = None
            if node.is_evictable:
                if self._rank(node) <= rank:
                    return node
                self.note(node)
        return None

    def serials(self) -> set[int]:
        return {entry[1] for entry in self._heap if self._is_newest(entry)}

    def _rank(self, node: Node) -> Rank:
        return self._rank_of_pages(node) if node.pages else FIRST

    def _compact(self) -> None:
        stale = [entry for entry in self._heap if not self._is_newest(entry)]
        self._heap = [entry for entry in self._heap if self._is_newest(entry)]
        heapq.heapify(self._heap)
        self._compact_at = 64 + 4 * len(self._heap)
        for rank, _, node in stale:
            if node.noted == rank:
                node.noted = None

    def _is_newest(self, entry: tuple[Rank, int, Node]) -> bool:
        return entry[2].is_evictable and entry[2].noted == entry[0]


@dataclass(slots=True, frozen=True)
class Match:
    """Longest usable prefix; lock `node` before any eviction.

    `window` parallels `pages`, 0 if missing. `state`: slot, or 0. `num_cached`: tokens with pages.
    """

    pages: list[int]
    node: Node
    state: int = 0
    num_cached: int = 0
    window: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class Inserted:
    """`node` covers the prefix; the tree had its first `existing` pages, callers keep theirs."""

    existing: int
    node: Node


def equal_pages(ours: Sequence[int], theirs: Sequence[int], page_size: int) -> int:
    """Leading pages that both have, by C slice comparison and bisection."""
    low, high = 0, min(len(ours), len(theirs)) // page_size  # pages [0, low) agree; the answer is in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        cut = slice(low * page_size, middle * page_size)
        if ours[cut] == theirs[cut]:
            low = middle
        else:
            high = middle - 1
    return low


# (tree, tokens, branch) -> longest usable prefix, marked used
MatchRule = Callable[["RadixCache", Sequence[int], Branch], Match]


def by_pages(cache: "RadixCache", tokens: Sequence[int], branch: Branch) -> Match:
    """Rule of models with pages only."""
    return cache.match(tokens, branch=branch)


class RadixCache:
    """Empty unless `enabled`. `parts`: in order of calls. `rule`: of `match_usable`."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        enabled: bool = True,
        order: EvictionOrder | None = None,
        parts: Sequence[TreePart] = (),
        rule: MatchRule = by_pages,
    ) -> None:
        self.enabled = enabled
        self._parts = tuple(parts)
        self._rule = rule
        self._allocator = allocator
        self.page_size = allocator.page_size
        self._serial = 0
        self._clock = 0
        self.root = Node(key=(), pages=[], parent=None, serial=0)
        self.root.locks = 1
        self._tops: dict[Branch, Node] = {}
        self._eviction_order = order or EvictionOrder(RANKS["lru"])
        self.num_pages = 0
        self.num_evictable = 0

    def num_cached(self, tokens: Sequence[int], *, branch: Branch = TRUNK) -> int:
        """Pages that `match` would find, without side effects."""
        return sum(shared for _, shared in self.path(tokens, branch=branch))

    def match(self, tokens: Sequence[int], *, branch: Branch = TRUNK) -> Match:
        """Find the longest page-aligned prefix, mark it used, and split its last node."""
        node = self._top(branch) if self.enabled else None
        if node is None:
            return Match([], self.root)
        pages = list[int]()
        self._clock += 1
        for child, shared in self._walk(tokens, node):
            node = self._split(child, shared) if shared < len(child.pages) else child
            node.last_used = self._clock
            pages.extend(node.pages)
        self._note_leaf(node)
        return Match(pages, node)

    def match_usable(self, tokens: Sequence[int], *, branch: Branch = TRUNK) -> Match:
        """Find the longest usable prefix by the rule, and mark it used."""
        return self._rule(self, tokens, branch)

    def path(self, tokens: Sequence[int], *, branch: Branch = TRUNK) -> list[tuple[Node, int]]:
        top = self._top(branch) if self.enabled else None
        return [] if top is None else list(self._walk(tokens, top))

    def touch(self, nodes: Sequence[Node]) -> None:
        self._clock += 1
        for node in nodes:
            node.last_used = self._clock
            self._note_leaf(node)

    def use(self, node: Node, *, priority: int = 0) -> None:
        """Count an admitted reader of the path to `node`, which it locked."""
        assert node.locks > 0
        for above in node.up():
            above.uses += 1
            above.priority = max(above.priority, priority)

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        *,
        branch: Branch = TRUNK,
        priority: int = 0,
    ) -> Inserted:
        assert len(tokens) == len(pages) * self.page_size
        if not self.enabled:
            return Inserted(existing=len(pages), node=self.root)
        if self._top(branch) is None:
            self._serial += 1
            self._tops[branch] = Node(key=(), pages=[], parent=self.root, serial=self._serial, branch=branch)
        match = self.match(tokens, branch=branch)
        existing = len(match.pages)
        if existing == len(pages):
            return Inserted(existing=existing, node=match.node)
        self._allocator.to_cache(pages[existing:])
        key = tuple(tokens[existing * self.page_size :])
        leaf = self._new_node(key, list(pages[existing:]), match.node)
        leaf.created = leaf.last_used = self._clock
        leaf.priority = priority
        self.num_pages += len(leaf.pages)
        self.num_evictable += len(leaf.pages)
        self._note_leaf(leaf)
        for part in self._parts:
            part.on_stored(leaf)
        return Inserted(existing=existing, node=leaf)

    def lock(self, node: Node) -> None:
        """Protect the path to `node` from eviction until `unlock`; locks are counted."""
        for above in node.up():
            if above.locks == 0:
                self.num_evictable -= len(above.pages)
            above.locks += 1

    def unlock(self, node: Node) -> None:
        for above in node.up():
            assert above.locks > 0, "unlock without lock"
            above.locks -= 1
            if above.locks == 0:
                self.num_evictable += len(above.pages)
                self._note_leaf(above)

    def evict(self, n: int) -> int:
        """Free at least `n` pages, or all evictable ones; return the number freed."""
        freed = 0
        while freed < n and (leaf := self._eviction_order.pop()) is not None:
            freed += self._remove(leaf)
        return freed

    def forget(self, variant: str) -> None:
        """Free the branches of an unloaded adapter; locked nodes are evicted later."""
        tops = [top for branch, top in self._tops.items() if variant and branch.variant == variant]
        for node in reversed(list(self._nodes(tops))):  # reversed: leaves first
            if node.is_evictable:
                self._remove(node)

    def flush(self) -> None:
        """Drop everything; nothing is locked."""
        assert self.num_evictable == self.num_pages, "flush with locked nodes"
        while (leaf := self._eviction_order.pop()) is not None:
            self._remove(leaf, evicted=False)
        for top in list(self._tops.values()):
            self._remove(top, evicted=False)  # empty now
        for part in self._parts:
            part.on_cleared()

    def _top(self, branch: Branch) -> Node | None:
        return self.root if branch == TRUNK else self._tops.get(branch)

    def _walk(self, tokens: Sequence[int], node: Node) -> Iterator[tuple[Node, int]]:
        size, at = self.page_size, 0
        while child := node.children.get(tuple(tokens[at : at + size])):
            shared, whole, end = self._shared_pages(child.key, tokens, at), len(child.pages), at + len(child.key)
            yield child, shared  # the caller may split `child`
            if shared < whole:
                return
            node, at = child, end

    def _shared_pages(self, key: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
        part = tuple(tokens[at : at + len(key)])
        if part == key:
            return len(key) // self.page_size
        return equal_pages(key, part, self.page_size)

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages` pages; return the new upper part."""
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        cut, parent = num_pages * self.page_size, node.parent
        upper = self._new_node(node.key[:cut], node.pages[:num_pages], parent)
        upper.locks, upper.created, upper.last_used = node.locks, node.created, node.last_used
        upper.uses, upper.priority = node.uses, node.priority
        node.key, node.pages, node.parent = node.key[cut:], node.pages[num_pages:], upper
        upper.children[node.key[: self.page_size]] = node
        for part in self._parts:
            part.on_split(upper, node)
        return upper

    def _new_node(self, key: tuple[int, ...], pages: list[int], parent: Node) -> Node:
        self._serial += 1
        node = Node(key=key, pages=pages, parent=parent, serial=self._serial)
        parent.children[key[: self.page_size]] = node
        return node

    def _remove(self, node: Node, *, evicted: bool = True) -> int:
        assert node.parent is not None
        if node.branch is None:
            del node.parent.children[node.key[: self.page_size]]
        else:
            del self._tops[node.branch]
        for part in self._parts:
            part.on_removed(node, evicted=evicted)
        self._allocator.evict(node.pages)
        self.num_pages -= len(node.pages)
        self.num_evictable -= len(node.pages)
        self._note_leaf(node.parent)
        node.parent = None
        return len(node.pages)

    def _note_leaf(self, node: Node) -> None:
        self._eviction_order.note(node)

    def _nodes(self, tops: Iterable[Node]) -> Iterator[Node]:
        stack = list(tops)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Check counters, locks, keys, page states, and evictable leaves."""
        noted = self._eviction_order.serials()
        pages: list[int] = []
        evictable = 0
        for node in self._nodes([*self.root.children.values(), *self._tops.values()]):
            for part in self._parts:
                part.check_node(node)
            assert len(node.key) == len(node.pages) * self.page_size
            if node.branch is None:
                assert node.pages and node.parent is not None, "an empty node"
                assert node.parent.children[node.key[: self.page_size]] is node
            else:
                assert not node.pages and node.parent is self.root and self._tops[node.branch] is node
            assert node.locks >= 0
            for child in node.children.values():
                assert node.locks >= child.locks
            assert not node.is_evictable or node.serial in noted
            pages += node.pages
            evictable += len(node.pages) if node.locks == 0 else 0
        assert (len(pages), evictable) == (self.num_pages, self.num_evictable)
        states = self._allocator.states_of(pages)
        assert states <= {"cached"}
        assert len(pages) == self._allocator.counts()["cached"]
