"""KV events: prefix cache changes, collected until `take`.

Pages have public names from all tokens up to their end (service/kv_events.py), stable when nodes
split. Image tokens have other ids there: 31 bits of their key id after the top bit, which no token
has. So readers match text before the first image only.
"""

from collections import Counter
from collections.abc import Sequence

from engine.core.mem_cache.radix_cache import TRUNK, Branch, Node, TreePart
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.images import FIRST_KEY_ID
from service.kv_events import (
    BLOCK_TOKENS,
    MEDIUM,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    open_chain,
    page_names,
    pages_make_blocks,
    token_seed,
)

SEEN = 1 << 31  # marks image tokens in 32-bit ids


class CacheEvents(TreePart):
    """Call `take` every loop turn to bound it."""

    def __init__(self, *, page_size: int) -> None:
        self._page_size = page_size
        self.named = pages_make_blocks(page_size)  # routers know these names
        self._block_size = BLOCK_TOKENS if self.named else page_size
        self._names: dict[int, int] = {}  # by cached page
        self._links: dict[int, bytes] = {}  # of pages that end a block
        self._events: list[KVEvent] = []

    # ---- the tree of a model to which pages are all: what is in the tree can be used

    def on_stored(self, node: Node) -> None:
        self.enter(node)
        self.announce(node, 0, len(node.pages))

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        if evicted:
            self.retract(node, 0, len(node.pages))
            self.leave(node)

    # ---- names and events

    def enter(self, node: Node) -> None:
        link, before = self._before(node)
        names = page_names(link, _shown(before), _shown(node.key), self._page_size)
        for page, (name, link) in zip(node.pages, names, strict=True):
            self._names[page] = name
            if link:
                self._links[page] = link

    def leave(self, node: Node) -> None:
        for page in node.pages:
            del self._names[page]
            self._links.pop(page, None)

    def announce(self, node: Node, start: int, end: int) -> None:
        """Announce pages `start`..`end` - 1 of `node` as usable after those before them."""
        branch, hashes = _branch(node), self._hashes(node, start, end)
        self._events.append(
            BlockStored(
                hashes,
                self._names[node.pages[start - 1]] if start else self._parent(node),
                list(_shown(node.key[start * self._page_size : end * self._page_size])),
                self._page_size,
                None,
                medium=MEDIUM,
                lora_name=branch.variant or None,
                extra_keys=[branch.namespace] * len(hashes) if branch.namespace else None,
            )
        )

    def retract(self, node: Node, start: int, end: int) -> None:
        """Announce that pages `start`..`end` - 1 of `node` are unusable."""
        if end > start:
            self._events.append(BlockRemoved(self._hashes(node, start, end), MEDIUM))

    def _parent(self, node: Node) -> int | None:
        above = node.parent
        return self._names[above.pages[-1]] if above is not None and above.pages else None

    def _before(self, node: Node) -> tuple[bytes, tuple[int, ...]]:
        _, *path = node.up()
        missing = sum(len(above.key) for above in path) % self._block_size
        tokens: tuple[int, ...] = ()
        for above in path:
            if missing < len(above.key):
                page = above.pages[-1 - missing // self._page_size]
                return self._links[page], above.key[len(above.key) - missing :] + tokens
            tokens = above.key + tokens
            missing -= len(above.key)
        return open_chain(token_seed(*_branch(node))), tokens

    def _hashes(self, node: Node, start: int, end: int) -> list[BlockHash]:
        return [self._names[page] for page in node.pages[start:end]]

    def on_cleared(self) -> None:
        self._names.clear()
        self._links.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Take changes since the last call, in order."""
        taken, self._events = self._events, []
        return taken


def _shown(tokens: Sequence[int]) -> Sequence[int]:
    if not tokens or max(tokens) < FIRST_KEY_ID:
        return tokens
    return [token if token < FIRST_KEY_ID else SEEN | token % SEEN for token in tokens]


def _branch(node: Node) -> Branch:
    *_, top = node.up()
    return top.branch or TRUNK


class UsablePrefixes(TreePart):
    """Usable prefixes of a tree with `states` or `windows`, as KV events.

    Pages without window or state stay in the tree, but are unusable. So a page is announced while
    a usable prefix passes it; routers count consecutive ones. Prompts that branch off earlier find
    less, which events cannot express.

      root -- page -- page -- page(state) -- page -- page    announced: the first three
         +--- page -- page                                   none announced

    Changes settle when events are taken, as windows come and go page by page.
    """

    def __init__(self, events: CacheEvents, *, states: StateSlots | None, windows: WindowPages | None) -> None:
        assert states is not None or windows is not None
        self._events, self.named = events, events.named
        self._states = states
        self._windows = windows
        self._announced: dict[Node, int] = {}  # pages per node, if any
        self._below = Counter[Node]()  # children with announced pages
        self._changed: dict[Node, bool] = {}  # node -> descendants changed, too
        if states is not None:
            states.on_change = self._on_state
        if windows is not None:
            windows.on_change = self._on_window

    # ---- the tree

    def on_stored(self, node: Node) -> None:
        self._events.enter(node)
        self._changed.setdefault(node, False)

    def on_split(self, upper: Node, lower: Node) -> None:
        announced, cut = self._announced.pop(lower, 0), len(upper.pages)
        if announced:
            self._announced[upper] = min(announced, cut)
        if announced > cut:
            self._announced[lower] = announced - cut
            self._below[upper] = 1
        if lower in self._changed:
            self._changed[upper] = self._changed[lower]

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        if not evicted:
            return
        self._changed.pop(node, None)
        self._below.pop(node, None)
        if announced := self._announced.pop(node, 0):
            self._events.retract(node, 0, announced)
            if parent := self._count(node, -1):
                self._changed.setdefault(parent, False)
        self._events.leave(node)

    def on_cleared(self) -> None:
        for kept in (self._announced, self._below, self._changed):
            kept.clear()
        self._events.on_cleared()

    def _on_state(self, node: Node) -> None:
        self._changed.setdefault(node, False)

    def _on_window(self, node: Node) -> None:
        self._changed[node] = True

    # ---- what is announced

    def take(self) -> list[KVEvent]:
        while self._changed:
            node, deep = self._changed.popitem()
            self._settle(node)
            if deep:
                self._settle_below(node)
        return self._events.take()

    def _settle_below(self, top: Node) -> None:
        assert self._windows is not None
        reach = self._windows.allocator.pages_for(self._windows.window)
        stack = [(child, reach) for child in top.children.values()]
        while stack:
            node, left = stack.pop()
            self._settle(node)
            if left > len(node.pages):
                stack += [(child, left - len(node.pages)) for child in node.children.values()]

    def _settle(self, node: Node) -> None:
        grown, shrunk, at = list[tuple[Node, int, int]](), list[tuple[Node, int, int]](), node
        while True:
            old, new = self._announced.get(at, 0), len(at.pages) if self._below[at] else self._usable(at)
            if new != old:
                (grown if new > old else shrunk).append((at, old, new))
                self._announced[at] = new
            if bool(old) == bool(new) or not (parent := self._count(at, 1 if new else -1)):
                break
            at = parent
        for changed, old, new in shrunk:  # children before parents
            self._events.retract(changed, new, old)
        for changed, old, new in reversed(grown):
            self._events.announce(changed, old, new)

    def _count(self, node: Node, by: int) -> Node | None:
        parent = node.parent
        assert parent is not None
        if not parent.pages:
            return None
        self._below[parent] += by
        return parent

    def _usable(self, node: Node) -> int:
        pages = len(node.pages)
        reach = pages if self._windows is None else self._windows.reach(node)
        if self._states is not None and not (node.state and reach == pages):
            return 0
        return reach


PrefixEvents = CacheEvents | UsablePrefixes


def events_of_tree(page_size: int, *, states: StateSlots | None, windows: WindowPages | None) -> PrefixEvents:
    events = CacheEvents(page_size=page_size)
    return events if states is None and windows is None else UsablePrefixes(events, states=states, windows=windows)
