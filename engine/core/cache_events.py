"""KV events: prefix cache changes, collected until `take`.

Pages have public names from all tokens up to their end (service/prefix_chain.py), stable when nodes
split. Image tokens have other ids there: 31 bits of their key id after the top bit, which no token
has. So readers match text before the first image only.
"""

from collections.abc import Iterator, Sequence

from engine.core.radix_node import TRUNK, Branch, Node, TreePart
from engine.images import FIRST_KEY_ID
from service.kv_events import MEDIUM, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from service.prefix_chain import BLOCK_TOKENS, open_chain, page_names, pages_make_blocks, token_seed

SEEN = 1 << 31  # marks image tokens in 32-bit ids


class CacheEvents(TreePart):
    """Call `take` every loop turn to bound it."""

    def __init__(self, *, page_size: int) -> None:
        self._page_size = page_size
        self._block_size = BLOCK_TOKENS if pages_make_blocks(page_size) else page_size
        self._names: dict[int, int] = {}  # by cached page
        self._links: dict[int, bytes] = {}  # of pages that end a block
        self._events: list[KVEvent] = []

    @property
    def named(self) -> bool:
        """Check that routers know these names."""
        return pages_make_blocks(self._page_size)

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
        """Name the pages of a new leaf."""
        link, before = self._before(node)
        names = page_names(link, _shown(before), _shown(node.key), self._page_size)
        for page, (name, link) in zip(node.pages, names, strict=True):
            self._names[page] = name
            if link:
                self._links[page] = link

    def leave(self, node: Node) -> None:
        """Forget the names of a removed leaf."""
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
                branch.adapter or None,
                medium=MEDIUM,
                extra_keys=[branch.namespace] * len(hashes) if branch.namespace else None,
            )
        )

    def retract(self, node: Node, start: int, end: int) -> None:
        """Announce that pages `start`..`end` - 1 of `node` are unusable."""
        if end > start:
            self._events.append(BlockRemoved(self._hashes(node, start, end), MEDIUM))

    def _parent(self, node: Node) -> int | None:
        above = next(_above(node), None)
        return None if above is None else self._names[above.pages[-1]]

    def _before(self, node: Node) -> tuple[bytes, tuple[int, ...]]:
        """Link of the last block before `node`, and tokens since."""
        missing = sum(len(above.key) for above in _above(node)) % self._block_size
        tokens: tuple[int, ...] = ()
        for above in _above(node):
            if missing < len(above.key):
                page = above.pages[-1 - missing // self._page_size]
                return self._links[page], above.key[len(above.key) - missing :] + tokens
            tokens = above.key + tokens
            missing -= len(above.key)
        return open_chain(_seed(_branch(node))), tokens

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


def _seed(branch: Branch) -> bytes:
    """The routers' seed without adapter; adapters, whose numbers are local, have their own."""
    return token_seed(b"#%d" % branch.adapter if branch.adapter else b"", branch.namespace)


def _above(node: Node) -> Iterator[Node]:
    parent = node.parent
    while parent is not None and parent.pages:
        yield parent
        parent = parent.parent


def _branch(node: Node) -> Branch:
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node.branch or TRUNK
