"""The engine in a test with a host tier and a disk made of a dict, both as late as they may be.

Steps run when they are collected, and the disk does its work when it is told to, reading and writing host pages at that
moment: a page that is reused before its copy was made shows as wrong KV.
"""

from collections import deque
from typing import Any

from engine.core.mem_cache.host_cache import HostCache, TierRoom
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.core.mem_cache.storage_tier import (
    FileIndex,
    PageDelete,
    PageRead,
    PageWrite,
    StorageDone,
    StorageWork,
)
from tests.core.engine_in_a_test import EngineInATest

PAGE, GRID = 4, 8


def identity(weights: str = "w0", page_size: int = PAGE) -> KVIdentity:
    return KVIdentity(layout="test", dtype="int", page_size=page_size, page_bytes=1, model="hash", weights=weights)


class TieredEngine(EngineInATest):
    """`disk_pages`: what the disk may hold (0: there is none); `files`: what lies there already (a restart)."""

    def __init__(
        self,
        *,
        host_pages: int,
        write_policy: str = "write_through",
        prefetch_policy: str = "best_effort",
        timeout_s: float = 1.0,
        ahead_pages: int = 0,
        disk_pages: int = 0,
        files: dict[bytes, Any] | None = None,
        host_states: int = 0,
        **engine: object,
    ) -> None:
        self.files = {} if files is None else files
        self.disk_pages = disk_pages
        there = [(k, 1) for k in self.files]
        index = FileIndex(max_bytes=disk_pages, file_bytes=1, state_bytes=1, files=there) if disk_pages else None
        for key in index.excess if index else ():
            del self.files[key]
        self.host = HostCache(
            room=TierRoom(host_pages, host_states, GRID, ahead_pages),
            identity=identity(),
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
            prefetch_timeout_s=timeout_s,
            storage=index,
        )
        super().__init__(**{"page_size": PAGE, "host": self.host, "lag": True, "grid": GRID, **engine})  # type: ignore[arg-type]
        self.work: deque[StorageWork] = deque()
        self.broken: set[bytes] = set()  # files that cannot be read

    def collect(self) -> None:
        super().collect()
        self.take_work()

    def take_work(self) -> None:
        if self.host.storage is not None:
            self.work += self.host.storage.take_work()

    def disk_turn(self, n: int = 1000) -> None:
        """The disk does `n` pieces of work."""
        self.take_work()
        for _ in range(min(n, len(self.work))):
            assert self.host.storage is not None
            self.host.storage.on_done(self._do(self.work.popleft()))
            assert len(self.files) <= self.disk_pages, "more bytes on disk than the limit"
            self.scheduler.check()

    def _do(self, work: StorageWork) -> StorageDone:
        match work:
            case PageRead(key, host_page):
                slots = None if key in self.broken else self.files.get(key)
                if slots is None:
                    return StorageDone(work, ok=False, bad=self.files.pop(key, None) is not None)
                self._set(host_page, slots)
            case PageWrite(key, host_page):
                for victim in work.victims:
                    del self.files[victim]
                self.files[key] = self._get(host_page)
            case PageDelete(keys):
                for key in keys:
                    del self.files[key]
        return StorageDone(work, ok=True)

    def _get(self, host_page: int) -> Any:
        """A host page's slots, or a state of the host."""
        first = self.host.pages.num_pages
        return list(self.model.host[host_page]) if host_page < first else self.model.host_states[host_page - first]

    def _set(self, host_page: int, found: Any) -> None:
        first = self.host.pages.num_pages
        if host_page < first:
            self.model.host[host_page] = list(found)
        else:
            self.model.host_states[host_page - first] = found

    def push_out(self) -> None:
        """Fill the device with something else."""
        pages = self.scheduler.memory.allocator.num_pages
        self.answer(f"filler{self.scheduler.counters.requests}", [49] * (pages * PAGE - 2), max_new_tokens=1)
