"""KV prefixes in files: host pages to write, and files to read for waiting requests.

  write (its copy is collected)    host page --> DiskWrite
  prefetch (its request waits)     host page <-- DiskRead     `awaits` skips the request meanwhile

Disk threads run `take_work` and report to `on_done`. Host pages in use are pinned. Reads and writes
take at most half of the host tier each.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.core.disk_index import DiskDelete, DiskDone, DiskIndex, DiskRead, DiskWork, DiskWrite
from engine.core.host_pages import HostPages
from engine.core.page_keys import RequestKeys
from engine.core.request import Request


class DiskTier:
    def __init__(
        self,
        index: DiskIndex,
        *,
        pages: HostPages,
        keys: RequestKeys,
        prefetch_policy: str,
        prefetch_timeout_s: float,
        counters: Counter[str],
    ) -> None:
        self.index = index
        self._pages = pages
        self._keys = keys
        self._prefetch_policy = prefetch_policy
        self._prefetch_timeout_s = prefetch_timeout_s
        self._counters = counters
        self._max_pending = max(1, pages.num_pages // 2)
        self._reading: dict[bytes, int] = {}  # key -> host page being filled from its file
        self._from_disk: set[int] = set()  # host pages read from a file, unused since
        self._num_writing = 0
        self._work: list[DiskWork] = []

    # ---- writes

    def write(self, host_pages: Iterable[int]) -> list[int]:
        """Start writes while there is room; return host pages to pin."""
        chosen: list[tuple[bytes, int]] = []
        for page in host_pages:
            key = self._pages.key_of(page)
            if key is None or self.index.holds(key):
                continue
            if self._num_writing + len(chosen) >= self._max_pending:
                self._counters["hicache_unwritten_pages"] += 1
                continue
            chosen.append((key, page))
        return [page for key, page in reversed(chosen) if self._begin_write(key, page)]

    def _begin_write(self, key: bytes, host_page: int) -> bool:
        victims = self.index.begin_write(key)
        if victims is None:
            self._counters["hicache_unwritten_pages"] += 1
            return False
        self._num_writing += 1
        self._work.append(DiskWrite(key, host_page, self._keys.identity, victims))
        return True

    # ---- reads

    def prefetch(self, request: Request, keys: Sequence[bytes]) -> None:
        """Read pages for `request`, up to the first without a file."""
        wanted = []
        for key in keys:
            if self._pages.get(key) is not None:
                continue
            if key not in self._reading and not self._begin_read(key):
                break
            wanted.append(key)
        request.lower_tiers.prefetching = wanted

    def _begin_read(self, key: bytes) -> bool:
        if not self.index.has(key) or len(self._reading) >= self._max_pending:
            return False
        if self._pages.next_to_go() in self._from_disk:  # the earlier request keeps its pages
            return False
        host_page = self._pages.take()
        if host_page is None:
            return False
        self.on_reuse(host_page)
        self.index.begin_read(key)
        self._reading[key] = host_page
        self._work.append(DiskRead(key, host_page, self._keys.identity))
        return True

    def awaits(self, request: Request, now_s: float) -> bool:
        """Return True while `request` waits for files, within a timeout."""
        tiers = request.lower_tiers
        if self._prefetch_policy == "best_effort" or not tiers.prefetching:
            return False
        if not any(key in self._reading for key in tiers.prefetching):
            tiers.prefetching = []
            return False
        if self._prefetch_policy == "wait_complete":
            return True
        if tiers.prefetch_until_s is None:
            tiers.prefetch_until_s = now_s + self._prefetch_timeout_s
        return now_s < tiers.prefetch_until_s

    @property
    def busy(self) -> bool:
        return bool(self._reading)

    def on_reuse(self, host_page: int) -> None:
        self._from_disk.discard(host_page)

    def take_read(self, host_pages: Iterable[int]) -> int:
        read = self._from_disk.intersection(host_pages)
        self._from_disk -= read
        return len(read)

    # ---- disk threads

    def take_work(self) -> list[DiskWork]:
        """Take new work; reads may overtake."""
        work, self._work = self._work, []
        return work

    def on_done(self, done: DiskDone) -> None:
        match done.work:
            case DiskRead():
                self._on_read(done, done.work)
            case DiskWrite():
                self._on_written(done, done.work)
            case DiskDelete():
                self.index.restore(done.undeleted)

    def _on_read(self, done: DiskDone, work: DiskRead) -> None:
        self.index.end_read(work.key, ok=done.ok, undeleted=done.undeleted)
        self._counters["hicache_bad_files"] += done.bad
        wanted = self._reading.get(work.key) == work.host_page  # False if all was forgotten meanwhile
        if wanted:
            del self._reading[work.key]
        if wanted and done.ok and self._pages.get(work.key) is None:
            self._pages.name(work.host_page, work.key)
            self._from_disk.add(work.host_page)
            self._counters["hicache_read_pages"] += 1
        self._pages.unpin(work.host_page)

    def _on_written(self, done: DiskDone, work: DiskWrite) -> None:
        self._num_writing -= 1
        self._counters["hicache_written_pages" if done.ok else "hicache_failed_writes"] += 1
        if delete := self.index.end_write(work, ok=done.ok, undeleted=done.undeleted):
            self._work.append(delete)
        self._pages.unpin(work.host_page)

    # ---- all of it

    def forget(self, *, files: bool) -> None:
        self._reading.clear()
        self._from_disk.clear()
        if files:
            self._work.append(self.index.clear())

    def gauges(self) -> dict[str, float]:
        return {
            "hicache_disk_used_bytes": float(self.index.num_bytes),
            "hicache_disk_files": float(self.index.num_files),
            "hicache_disk_pending": float(self._num_writing + len(self._reading)),
        }

    def check(self) -> None:
        assert all(self._pages.key_of(page) is not None for page in self._from_disk)
        assert all(self._pages.is_pinned(page) for page in self._reading.values()), "a page that is read is not pinned"
        self.index.check()
