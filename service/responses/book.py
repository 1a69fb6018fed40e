"""Stored and running responses of one process."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from service.responses.store import ResponseStore, StoredResponse

CANCEL_TIMEOUT_S = 4.0  # until a cancelled response ends; router processes wait 5 s for each other


class ResponseBook(Protocol):
    """Responses by `id`, visible to their `owner`."""

    async def find(self, id: str, owner: str) -> list[StoredResponse]:
        """Return a response and its ancestors, newest first."""

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
