"""KV events: changes of the prefix cache, collected until the next `take`.

Pages get names that hold outside: a chained hash of all tokens up to the page's end. A split of a node changes no name.
"""

from engine.core.page_keys import next_keys
from engine.core.radix_node import Node
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
        adapter = _adapter(node)
        keys = next_keys(above or f"adapter {adapter}".encode(), node.key, self._page_size)
        self._keys.update(zip(node.pages, keys, strict=True))
        parent_hash = None if above is None else _short(above)
        hashes: list[BlockHash] = [_short(key) for key in keys]
        self._events.append(BlockStored(hashes, parent_hash, list(node.key), self._page_size, adapter or None, MEDIUM))

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


def _adapter(node: Node) -> int:
    """Return the adapter of the branch that holds `node`, from the key of the root's child."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return -node.key[0] if node.key and node.key[0] < 0 else 0
