"""What a reader of KV events believes of a prefix cache, against what a request could use of it."""

from collections.abc import Sequence

from engine.core.mem_cache.radix_cache import TRUNK, Branch, Node
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.memory import Memory
from engine.images import FIRST_KEY_ID
from service.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

Prefix = tuple[Branch, tuple[int, ...]]  # tokens from the prompt's start


class Announced:
    """The prefixes that events announce, page by page."""

    def __init__(self) -> None:
        self._prefixes: dict[BlockHash, Prefix] = {}
        self.num_removed = 0

    def read(self, events: Sequence[KVEvent]) -> None:
        """A page comes after the one before it, and goes once."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(block_hashes=hashes):
                    self.num_removed += len(hashes)
                    for name in hashes:
                        del self._prefixes[name]
                case AllBlocksCleared():
                    self._prefixes.clear()

    def _store(self, event: BlockStored) -> None:
        namespace = () if event.extra_keys is None else event.extra_keys[0]
        branch, before = Branch(event.lora_name or "", namespace), tuple[int, ...]()
        if event.parent_block_hash is not None:
            branch, before = self._prefixes[event.parent_block_hash]
        for i, name in enumerate(event.block_hashes):
            assert name not in self._prefixes, "a page is announced twice"
            before += tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            self._prefixes[name] = (branch, before)

    def num_pages(self, tokens: Sequence[int], *, page_size: int, branch: Branch = TRUNK) -> int:
        """Announced pages with which `tokens` begin."""
        known, pages = set(self._prefixes.values()), 0
        while (branch, tuple(tokens[: (pages + 1) * page_size])) in known and (pages + 1) * page_size <= len(tokens):
            pages += 1
        return pages

    def check(self, memory: Memory) -> None:
        """Exactly what lies before the end of a prefix that a request could begin from."""
        announced = set(self._prefixes.values())
        assert len(announced) == len(self._prefixes) and announced == usable_prefixes(memory)


def usable_prefixes(memory: Memory) -> set[Prefix]:
    """By its definition, prefix by prefix."""
    found, size = set[Prefix](), memory.allocator.page_size
    tops = [(TRUNK, memory.cache.root), *memory.cache._tops.items()]
    for branch, top in tops:
        for path in _paths(top):
            tokens = tuple(_shown(token) for node in path for token in node.key)
            window = [page for node in path for page in node.window]
            ends = _ends(memory, path)
            usable = [end for end in ends if _window_is_there(memory, window, end)]
            found |= {(branch, tokens[: i * size]) for i in range(1, 1 + max(usable, default=0))}
    return found


def _shown(token: int) -> int:
    """What events say of it: of a token of an image 31 bits of its key id."""
    return token if token < FIRST_KEY_ID else 1 << 31 | token & (1 << 31) - 1


def _paths(top: Node) -> list[list[Node]]:
    """To every node below `top`."""
    return [[child, *rest] for child in top.children.values() for rest in ([], *_paths(child))]


def _ends(memory: Memory, path: list[Node]) -> list[int]:
    """Lengths in pages inside the last node of `path` from which the state of a request could begin."""
    total, last = sum(len(node.pages) for node in path), path[-1]
    if memory.part(StateSlots) is not None:
        return [total] if last.state else []
    return list(range(total - len(last.pages) + 1, total + 1))


def _window_is_there(memory: Memory, window: list[int], end: int) -> bool:
    """Whether the query behind `end` pages finds all keys that it sees."""
    if (windows := memory.part(WindowPages)) is None:
        return True
    position, size = end * memory.allocator.page_size, memory.allocator.page_size
    seen = range(max(0, position - windows.window + 1), position)
    return all(window[token // size] for token in seen)
