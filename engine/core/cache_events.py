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

    def on_stored(self, node: Node) -> None:
        """Note a new leaf."""
        parent = node.parent
        assert parent is not None
        above = self._keys[parent.pages[-1]] if parent.pages else None
        branch = _branch(node)
        keys = next_keys(above or _seed(branch), node.key, self._page_size)
        self._keys.update(zip(node.pages, keys, strict=True))
        parent_hash = None if above is None else _short(above)
        hashes: list[BlockHash] = [_short(key) for key in keys]
        tokens, namespaces = list(node.key), [branch.namespace] * len(keys) if branch.namespace else None
        self._events.append(
            BlockStored(
                hashes,
                parent_hash,
                tokens,
                self._page_size,
                branch.adapter or None,
                medium=MEDIUM,
                extra_keys=namespaces,
            )
        )

    def on_removed(self, node: Node) -> None:
        if node.pages:
            self._events.append(BlockRemoved([_short(self._keys.pop(page)) for page in node.pages], MEDIUM))

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
