"""Ownership of KV pages: free, held by a request, cached in the radix tree, or quarantined.

    FREE --allocate--> HELD --to_cache--> CACHED --evict--> FREE
    HELD --free--> FREE
    HELD --quarantine--> QUARANTINED --end_quarantine--> FREE

Other transitions assert. A transfer peer may still write a quarantined page.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from engine.images import KEY_BYTES

FREE, HELD, CACHED, QUARANTINED = range(4)
SORT_WHEN_UNSORTED = 8  # sort when one in 8 free pages is unsorted
SINGLES = 64  # set aside for requests that grow by a page
_NAMES = ("free", "held", "cached", "quarantined")


class PageAllocator:
    """Pages 1..num_pages; page 0 is the executor's scratch."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        assert num_pages >= 1 and page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self._state = bytearray(num_pages + 1)
        self._free = list(range(num_pages, 0, -1))  # popped from the end: low ids first
        self._singles: list[int] = []  # also free; from the other end
        self._num_unsorted = 0  # freed since the list was sorted
        self._counts = [num_pages, 0, 0, 0]

    @property
    def num_free(self) -> int:
        return self._counts[FREE]

    def counts(self) -> dict[str, int]:
        return dict(zip(_NAMES, self._counts, strict=True))

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages, adjacent if cheap: they transfer as one piece.

        Sorting is amortized. Single pages come from the list's other end, leaving runs for prompts.
        """
        assert 0 <= n <= self.num_free, f"{n} pages requested, {self.num_free} are free"
        if n == 0:
            return []
        if n == 1:
            return self._allocate_single()
        if n > len(self._free):
            self._free[:0], self._singles = self._singles, []
        if self._num_unsorted * SORT_WHEN_UNSORTED >= len(self._free):
            self._free.sort(reverse=True)
            self._num_unsorted = 0
        pages = self._free[-n:]
        del self._free[-n:]
        pages.reverse()
        self._move(pages, FREE, HELD)
        return pages

    def _allocate_single(self) -> list[int]:
        if not self._singles:
            self._singles = self._free[:SINGLES]
            del self._free[:SINGLES]
        pages = [self._singles.pop()]
        self._move(pages, FREE, HELD)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        self._move(pages, HELD, FREE)
        self._give_back(pages)

    def to_cache(self, pages: Sequence[int]) -> None:
        self._move(pages, HELD, CACHED)

    def evict(self, pages: Sequence[int]) -> None:
        self._move(pages, CACHED, FREE)
        self._give_back(pages)

    def quarantine(self, pages: Sequence[int]) -> None:
        self._move(pages, HELD, QUARANTINED)

    def end_quarantine(self, pages: Sequence[int]) -> None:
        self._move(pages, QUARANTINED, FREE)
        self._give_back(pages)

    def _give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))
        self._num_unsorted += len(pages)

    def _move(self, pages: Sequence[int], source: int, target: int) -> None:
        state = self._state
        for page in pages:
            assert page > 0 and state[page] == source, (
                f"page {page} is {_NAMES[state[page]]}, cannot go from {_NAMES[source]} to {_NAMES[target]}"
            )
            state[page] = target
        self._counts[source] -= len(pages)
        self._counts[target] += len(pages)

    def state_of(self, page: int) -> str:
        return _NAMES[self._state[page]]

    def states_of(self, pages: Iterable[int]) -> set[str]:
        return {_NAMES[state] for state in set(map(self._state.__getitem__, pages))}

    def check(self) -> None:
        assert sum(self._counts) == self.num_pages, f"{self.counts()} do not add up to {self.num_pages}"
        free = {*self._free, *self._singles}
        assert len(self._free) + len(self._singles) == self._counts[FREE] == len(free)
        states = self.states_of(free)
        assert states <= {_NAMES[FREE]}
        for state in range(4):
            expected = self._counts[state] + (1 if state == FREE else 0)  # page 0 stays FREE in the array
            assert self._state.count(state) == expected


class KVIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of KV besides tokens; `weights` is version and fingerprint."""

    layout: str
    dtype: str
    page_size: int
    page_bytes: int
    model: str
    weights: str
    state_bytes: int = 0

    def bytes_of(self, key: bytes) -> int:
        return self.state_bytes if is_state(key) else self.page_bytes

    def seed(self, adapter: str = "", namespace: tuple[str, ...] = ()) -> bytes:
        """Chain start per adapter (its digest) and namespace."""
        return hashlib.sha256(msgspec.msgpack.encode((msgspec.structs.astuple(self), adapter, *namespace))).digest()


_STATE = b"s"


def state_key(page: bytes) -> bytes:
    """Key of the state at the page's end."""
    return page + _STATE


def is_state(key: bytes) -> bool:
    return len(key) > hashlib.sha256().digest_size


def next_keys(before: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of whole pages after key `before` or the seed."""
    assert len(tokens) % page_size == 0
    keys = []
    for at in range(0, len(tokens), page_size):
        before = hashlib.sha256(before + _packed(tokens[at : at + page_size])).digest()
        keys.append(before)
    return keys


def _packed(tokens: Sequence[int]) -> bytes:
    """Unique bytes; pages with image ids use more."""
    try:
        return array("q", tokens).tobytes()
    except OverflowError:
        return b"".join([token.to_bytes(KEY_BYTES + 1, "little", signed=True) for token in tokens])
