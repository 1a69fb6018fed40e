"""Usable lengths of cached prefixes for models with more than pages; each tree has one rule."""

from collections.abc import Callable, Sequence

from engine.core.mem_cache.radix_cache import Branch, Match, Node, RadixCache
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages


class ByWindow:
    """Window layers: a prefix's last window is complete."""

    def __init__(self, windows: WindowPages) -> None:
        self._windows = windows

    def __call__(self, cache: RadixCache, tokens: Sequence[int], branch: Branch) -> Match:
        found = [page for node, shared in cache.path(tokens, branch=branch) for page in node.window[:shared]]
        usable = self._windows.usable(found)
        match = cache.match(tokens[: usable * cache.page_size], branch=branch)
        return Match(match.pages, match.node, window=tuple(found[:usable]))


class ByState:
    """Recurrent layers: a prefix ends at a snapshot. `whole` checks windows, too."""

    def __init__(self, states: StateSlots, *, whole: Callable[[Sequence[int]], bool] = lambda window: True) -> None:
        self._states = states
        self._whole = whole

    def __call__(self, cache: RadixCache, tokens: Sequence[int], branch: Branch) -> Match:
        path, num_cached, usable = list[Node](), 0, 0
        window, usable_window = list[int](), 0
        for node, shared in cache.path(tokens, branch=branch):
            num_cached += shared * cache.page_size
            path.append(node)
            window += node.window[:shared]
            if node.state and shared == len(node.pages) and self._whole(window):
                usable, usable_window = len(path), len(window)
        cache.touch(path)
        if not usable:
            return Match([], cache.root, num_cached=num_cached)
        node = path[usable - 1]
        self._states.touch(node)
        pages = [page for above in path[:usable] for page in above.pages]
        return Match(pages, node, state=node.state, num_cached=num_cached, window=tuple(window[:usable_window]))
