"""Usable prefixes of models with windows or recurrent states, for KV events.

Pages without window or state stay in the tree, but are unusable. So a page is announced while a
usable prefix passes it; routers count consecutive ones. Prompts that branch off earlier find less,
which events cannot express.

  root -- page -- page -- page(state) -- page -- page    announced: the first three
     +--- page -- page                                   none announced

Changes settle when events are taken, as windows come and go page by page.
"""

from collections import Counter

from engine.core.cache_events import CacheEvents
from engine.core.radix_node import Node, TreePart
from engine.core.state_slots import StateSlots
from engine.core.window_pages import WindowPages
from service.kv_events import KVEvent


class UsablePrefixes(TreePart):
    """Between the tree and its `events`, with its `states` or `windows`."""

    def __init__(self, events: CacheEvents, *, states: StateSlots | None, windows: WindowPages | None) -> None:
        assert states is not None or windows is not None
        self._events = events
        self._states = states
        self._windows = windows
        self._announced: dict[Node, int] = {}  # pages per node, if any
        self._below = Counter[Node]()  # children with announced pages
        self._changed: dict[Node, bool] = {}  # node -> descendants changed, too
        if states is not None:
            states.on_change = self._on_state
        if windows is not None:
            windows.on_change = self._on_window

    @property
    def named(self) -> bool:
        return self._events.named

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
        """Settle nodes whose queries may read pages of `top`."""
        assert self._windows is not None
        reach = self._windows.allocator.pages_for(self._windows.window)
        stack = [(child, reach) for child in top.children.values()]
        while stack:
            node, left = stack.pop()
            self._settle(node)
            if left > len(node.pages):
                stack += [(child, left - len(node.pages)) for child in node.children.values()]

    def _settle(self, node: Node) -> None:
        """Announce and retract pages of `node` and its path."""
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
        """Count `node` in its parent, and return that, if any."""
        parent = node.parent
        assert parent is not None
        if not parent.pages:
            return None
        self._below[parent] += by
        return parent

    def _usable(self, node: Node) -> int:
        """Pages of `node` up to the last usable length."""
        pages = len(node.pages)
        reach = pages if self._windows is None else self._windows.reach(node)
        if self._states is not None and not (node.state and reach == pages):
            return 0
        return reach


PrefixEvents = CacheEvents | UsablePrefixes


def events_of_tree(page_size: int, *, states: StateSlots | None, windows: WindowPages | None) -> PrefixEvents:
    events = CacheEvents(page_size=page_size)
    return events if states is None and windows is None else UsablePrefixes(events, states=states, windows=windows)
