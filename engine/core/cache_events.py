"""KV events: changes of the prefix cache, collected until the next `take`.

Pages get names that hold outside: a chained hash of all tokens up to the page's end. A split of a node changes no name.
"""

import hashlib

import msgspec

from engine.core.page_keys import next_keys
from engine.core.radix_node import TRUNK, Branch, Node
from service.kv_events import MEDIUM, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

HASH_BYTES = 8


class CacheEvents:
    """Call `take` once a turn of the loop, or it grows."""

    def __init__(self, *, page_size: int) -> None:
        self._page_size = page_size
        self._keys: dict[int, bytes] = {}  # of cached pages
        self._events: list[KVEvent] = []

    # ---- the tree of a model to which pages are all: what is in the tree can be used

    def on_stored(self, node: Node) -> None:
        """Note a new leaf."""
        self.enter(node)
        self.announce(node, 0, len(node.pages))

    def on_split(self, upper: Node, lower: Node) -> None:
        """`upper` has got the first pages of `lower`."""

    def on_removed(self, node: Node) -> None:
        """Note that a leaf goes."""
        self.retract(node, 0, len(node.pages))
        self.leave(node)

    # ---- names and events

    def enter(self, node: Node) -> None:
        """Name the pages of a new leaf."""
        above = self._above(node)
        keys = next_keys(_seed(_branch(node)) if above is None else above, node.key, self._page_size)
        self._keys.update(zip(node.pages, keys, strict=True))

    def leave(self, node: Node) -> None:
        """Forget the names of a leaf that goes."""
        for page in node.pages:
            del self._keys[page]

    def announce(self, node: Node, start: int, end: int) -> None:
        """Say that pages `start`..`end` - 1 of `node` can be used, as those before them."""
        above = self._keys[node.pages[start - 1]] if start else self._above(node)
        branch, hashes = _branch(node), self._hashes(node, start, end)
        self._events.append(
            BlockStored(
                hashes,
                None if above is None else _short(above),
                list(node.key[start * self._page_size : end * self._page_size]),
                self._page_size,
                branch.adapter or None,
                medium=MEDIUM,
                extra_keys=[branch.namespace] * len(hashes) if branch.namespace else None,
            )
        )

    def retract(self, node: Node, start: int, end: int) -> None:
        """Say that pages `start`..`end` - 1 of `node` can no longer be used."""
        if end > start:
            self._events.append(BlockRemoved(self._hashes(node, start, end), MEDIUM))

    def _above(self, node: Node) -> bytes | None:
        """Return the key of the page before `node`; None: a prompt begins with it."""
        parent = node.parent
        assert parent is not None
        return self._keys[parent.pages[-1]] if parent.pages else None

    def _hashes(self, node: Node, start: int, end: int) -> list[BlockHash]:
        return [_short(self._keys[page]) for page in node.pages[start:end]]

    def on_cleared(self) -> None:
        self._keys.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Take the changes since the last call, in order."""
        taken, self._events = self._events, []
        return taken


def _short(key: bytes) -> int:
    return int.from_bytes(key[:HASH_BYTES])


def _seed(branch: Branch) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(branch)).digest()


def _branch(node: Node) -> Branch:
    """Return the branch that holds `node`."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node.branch or TRUNK
