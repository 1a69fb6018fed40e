"""A bounded LRU store of responses. Pure.

    resp_1 <- resp_2 <- resp_3       previous_response_id; resp_3 needs all three
                     <- resp_4

Reading touches ancestors last: descendants are evicted first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

OVERHEAD_BYTES = 512  # per entry, besides its texts


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`previous`: its parent's id. `input`: own items, comma-separated JSON."""

    id: str
    owner: str
    previous: str
    input: bytes
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.response) + OVERHEAD_BYTES


MAX_BYTES = 64 << 20  # about a thousand long answers


class ResponseStore:
    def __init__(self, *, max_count: int, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_count, self._max_bytes = max_count, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Store a new response, evicted at once if too large."""
        if stored.id in self._responses:
            return
        self._responses[stored.id] = stored
        self.num_bytes += stored.num_bytes
        self._touch(stored)
        while len(self._responses) > self._max_count or self.num_bytes > self._max_bytes:
            _, evicted = self._responses.popitem(last=False)
            self.num_bytes -= evicted.num_bytes

    def get(self, id: str, *, owner: str) -> StoredResponse | None:
        stored = self._owned(id, owner)
        self._touch(stored)
        return stored

    def conversation(self, id: str, *, owner: str) -> list[StoredResponse]:
        found: list[StoredResponse] = []
        stored = self.get(id, owner=owner)
        while stored is not None and len(found) < len(self._responses):
            found.append(stored)
            stored = self._owned(stored.previous, owner)
        return found

    def remove(self, id: str, *, owner: str) -> bool:
        """Remove it; descendants can be read but not continued."""
        stored = self._owned(id, owner)
        if stored is None:
            return False
        del self._responses[id]
        self.num_bytes -= stored.num_bytes
        return True

    def check(self) -> None:
        assert self.num_bytes == sum(stored.num_bytes for stored in self._responses.values())
        assert len(self._responses) <= self._max_count and self.num_bytes <= self._max_bytes
        order = list(self._responses)
        for at, stored in enumerate(self._responses.values()):
            assert stored.previous not in order[:at], (stored.previous, stored.id)

    def _owned(self, id: str, owner: str) -> StoredResponse | None:
        stored = self._responses.get(id)
        return stored if stored is not None and stored.owner == owner else None

    def _touch(self, stored: StoredResponse | None) -> None:
        for _ in range(len(self._responses)):  # bounded, whatever the input
            if stored is None:
                return
            self._responses.move_to_end(stored.id)
            stored = self._responses.get(stored.previous)


# ---- Stored and running responses of one process.

CANCEL_TIMEOUT_S = 4.0  # until a cancelled response ends; router processes wait 5 s for each other


class ResponseBook(Protocol):
    """Responses by `id`, visible to their `owner`."""

    async def find(self, id: str, owner: str) -> list[StoredResponse]:
        """A response and its ancestors, newest first."""

    async def remove(self, id: str, owner: str) -> bool: ...
    async def cancel(self, id: str, owner: str) -> bool:
        """Abort a running response and wait; False if none."""


Abort = Callable[[str], Awaitable[object]]


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    owner: str
    abort: Abort
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LocalBook:
    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._live: dict[str, _Live] = {}

    @contextmanager
    def running(self, id: str, owner: str, *, abort: Abort) -> Iterator[None]:
        """Register a response in the context; `abort(id)` ends it."""
        live = self._live[id] = _Live(owner, abort)
        try:
            yield
        finally:
            live.ended.set()
            if self._live.get(id) is live:  # else a worker has used an id twice
                del self._live[id]

    async def find(self, id: str, owner: str) -> list[StoredResponse]:
        return self.store.conversation(id, owner=owner)

    async def remove(self, id: str, owner: str) -> bool:
        return self.store.remove(id, owner=owner)

    async def cancel(self, id: str, owner: str) -> bool:
        live = self._live.get(id)
        if live is None or live.owner != owner:
            return False
        await live.abort(id)
        async with asyncio.timeout(CANCEL_TIMEOUT_S):
            await live.ended.wait()
        return True
