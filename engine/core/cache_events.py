"""Changes of the prefix cache, collected until the next `take`: the source of KV events.

Pages get names that hold outside: a chained hash of all tokens up to the page's end. A split of a node changes no name.
"""

from dataclasses import dataclass

from engine.core.page_keys import next_keys
from engine.core.radix_node import Node

HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """`hashes`: of the pages with `tokens`, which follow the page `parent` (None: the start of a prompt)."""

    hashes: list[int]
    parent: int | None
    tokens: list[int]
    adapter: int


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: list[int]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


CacheEvent = Stored | Removed | Cleared


class CacheEvents:
    """Call `take` once a turn of the loop, or it grows."""

    def __init__(self, *, page_size: int) -> None:
        self.page_size = page_size
        self._keys: dict[int, bytes] = {}  # of cached pages
        self._events: list[CacheEvent] = []

    def on_stored(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        above = self._keys[parent.pages[-1]] if parent.pages else None
        adapter = _adapter(node)
        keys = next_keys(above or f"adapter {adapter}".encode(), node.key, self.page_size)
        self._keys.update(zip(node.pages, keys, strict=True))
        self._events.append(
            Stored([_short(key) for key in keys], None if above is None else _short(above), list(node.key), adapter)
        )

    def on_removed(self, node: Node) -> None:
        if node.pages:
            self._events.append(Removed([_short(self._keys.pop(page)) for page in node.pages]))

    def on_cleared(self) -> None:
        self._keys.clear()
        self._events.append(Cleared())

    def take(self) -> list[CacheEvent]:
        """Take the changes since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    @property
    def num_named(self) -> int:
        """Count the pages that subscribers know as cached once they have all events."""
        return len(self._keys)


def _short(key: bytes) -> int:
    return int.from_bytes(key[:HASH_BYTES])


def _adapter(node: Node) -> int:
    """Return the adapter of the branch that holds `node`, from the key of the root's child."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return -node.key[0] if node.key and node.key[0] < 0 else 0
