"""The engine in a test with a host tier and a disk made of a dict, both as late as they may be.

Steps run when they are collected, and the disk does its work when it is told to, reading and writing host pages at that
moment: a page that is reused before its copy was made shows as wrong KV.
"""

from collections import deque

from engine.core.mem_cache.disk_tier import DiskDelete, DiskDone, DiskIndex, DiskRead, DiskWork, DiskWrite
from engine.core.mem_cache.host_cache import HostCache
from engine.core.mem_cache.page_allocator import KVIdentity
from tests.core.engine_in_a_test import EngineInATest

PAGE = 4


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
        files: dict[bytes, list[int]] | None = None,
        **engine: object,
    ) -> None:
        self.files = {} if files is None else files
        self.disk_pages = disk_pages
        index = (
            DiskIndex(max_bytes=disk_pages, file_bytes=1, files=[(k, 1) for k in self.files]) if disk_pages else None
        )
        for key in index.excess if index else ():
            del self.files[key]
        self.host = HostCache(
            num_pages=host_pages,
            identity=identity(),
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
            prefetch_timeout_s=timeout_s,
            ahead_pages=ahead_pages,
            disk=index,
        )
        super().__init__(**{"page_size": PAGE, "host": self.host, "lag": True, **engine})  # type: ignore[arg-type]
        self.work: deque[DiskWork] = deque()
        self.broken: set[bytes] = set()  # files that cannot be read

    def collect(self) -> None:
        super().collect()
        self.take_work()

    def take_work(self) -> None:
        if self.host.disk is not None:
            self.work += self.host.disk.take_work()

    def disk_turn(self, n: int = 1000) -> None:
        """The disk does `n` pieces of work."""
        self.take_work()
        for _ in range(min(n, len(self.work))):
            assert self.host.disk is not None
            self.host.disk.on_done(self._do(self.work.popleft()))
            assert len(self.files) <= self.disk_pages, "more bytes on disk than the limit"
            self.scheduler.check()

    def _do(self, work: DiskWork) -> DiskDone:
        match work:
            case DiskRead(key, host_page):
                slots = None if key in self.broken else self.files.get(key)
                if slots is None:
                    return DiskDone(work, ok=False, bad=self.files.pop(key, None) is not None)
                self.model.host[host_page] = list(slots)
            case DiskWrite(key, host_page):
                for victim in work.victims:
                    del self.files[victim]
                self.files[key] = list(self.model.host[host_page])
            case DiskDelete(keys):
                for key in keys:
                    del self.files[key]
        return DiskDone(work, ok=True)

    def push_out(self) -> None:
        """Fill the device with something else."""
        pages = self.scheduler.memory.allocator.num_pages
        self.answer(f"filler{self.scheduler.counters.requests}", [49] * (pages * PAGE - 2), max_new_tokens=1)
