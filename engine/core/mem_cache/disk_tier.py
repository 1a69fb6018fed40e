"""KV prefixes in files: host pages to write, and files to read for waiting requests.

  write (its copy is collected)    host page --> DiskWrite
  prefetch (its request waits)     host page <-- DiskRead     `awaits` skips the request meanwhile

Disk threads run `take_work` and report to `on_done`. Host pages in use are pinned. Reads and writes
take at most half of the host tier each.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.mem_cache.page_allocator import KVIdentity, next_keys
from engine.core.request import Request


class RequestKeys:
    """Cached page keys of requests.

    `run_id` separates processes: files outlive one, adapter numbers do not.

      seed = H(identity of the KV, branch)     key[0] = H(seed, tokens of page 0)
      key[i] = H(key[i-1], tokens of page i)

    Equal keys mean equal KV, across processes. SHA-256 prevents deliberate collisions, which would
    read another client's KV.
    """

    def __init__(self, identity: KVIdentity, *, run_id: str) -> None:
        self.identity = identity
        self._run_id = run_id

    def of(self, request: Request, num_pages: int) -> list[bytes]:
        adapter = f"adapter {request.adapter} of {self._run_id}" if request.adapter else ""
        seed = self.identity.seed(adapter, request.message.namespace)
        size, known = self.identity.page_size, request.lower_tiers
        if known.seed != seed:
            known.keys, known.seed = [], seed
        keys = known.keys
        if len(keys) < num_pages:
            tokens = request.key_tokens(len(keys) * size, num_pages * size)
            keys += next_keys(keys[-1] if keys else seed, tokens, size)
        return keys[:num_pages]


@dataclass(slots=True, frozen=True)
class DiskRead:
    key: bytes
    host_page: int
    identity: KVIdentity


@dataclass(slots=True, frozen=True)
class DiskWrite:
    """Delete `victims`, then write `host_page`."""

    key: bytes
    host_page: int
    identity: KVIdentity
    victims: tuple[bytes, ...] = ()


@dataclass(slots=True, frozen=True)
class DiskDelete:
    keys: tuple[bytes, ...]


DiskWork = DiskRead | DiskWrite | DiskDelete
Files = tuple[tuple[bytes, int], ...]  # (key, bytes)


@dataclass(slots=True, frozen=True)
class DiskDone:
    """Not tried with `undeleted` victims; a failed read deleted its file, `bad` if corrupt."""

    work: DiskWork
    ok: bool
    bad: bool = False
    undeleted: Files = ()


class DiskIndex:
    """Index of files in LRU order; delete `excess` first.

    A write counts from its decision, a file until its reported deletion, and victims are deleted
    before the write: bytes on disk never exceed the limit.
    """

    def __init__(self, *, max_bytes: int, file_bytes: int, files: Iterable[tuple[bytes, int]] = ()) -> None:
        self._max_bytes = max_bytes
        self._file_bytes = file_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict(files)  # least recently used first
        self._writing: set[bytes] = set()
        self._doomed: set[bytes] = set()  # being written, to be deleted then
        self._reading: set[bytes] = set()
        self.num_bytes = sum(self._sizes.values())
        self.excess = self._make_room(0) or ()

    @property
    def num_files(self) -> int:
        return len(self._sizes)

    def has(self, key: bytes) -> bool:
        """The file can be read."""
        return key in self._sizes and key not in self._writing

    def holds(self, key: bytes) -> bool:
        """True if the file exists or is being written."""
        return key in self._sizes

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def begin_write(self, key: bytes) -> tuple[bytes, ...] | None:
        """Return files to delete first, or None: no room, or it exists."""
        if key in self._sizes:
            return None
        victims = self._make_room(self._file_bytes)
        if victims is None:
            return None
        self._sizes[key] = self._file_bytes
        self.num_bytes += self._file_bytes
        self._writing.add(key)
        return victims

    def end_write(self, work: DiskWrite, *, ok: bool, undeleted: Files) -> DiskDelete | None:
        """Return the file to delete if cleared meanwhile."""
        self._writing.remove(work.key)
        if not ok:
            self._drop(work.key)
        self.restore(undeleted)
        if work.key not in self._doomed:
            return None
        self._doomed.remove(work.key)
        self._drop(work.key)
        return DiskDelete((work.key,)) if ok else None

    def begin_read(self, key: bytes) -> None:
        assert self.has(key)
        self._reading.add(key)

    def end_read(self, key: bytes, *, ok: bool, undeleted: Files) -> None:
        self._reading.discard(key)
        if not ok:
            self._drop(key)
            self.restore(undeleted)

    def clear(self) -> DiskDelete:
        """Forget all files; one being written is deleted later."""
        self._doomed |= self._writing
        keys = tuple(key for key in self._sizes if key not in self._writing)
        for key in keys:
            self._drop(key)
        return DiskDelete(keys)

    def _make_room(self, size: int) -> tuple[bytes, ...] | None:
        victims, room = list[bytes](), self._max_bytes - self.num_bytes
        for key, held in self._sizes.items():
            if room >= size:
                break
            if key not in self._writing and key not in self._reading:
                victims.append(key)
                room += held
        if room < size:
            return None
        for key in victims:
            self._drop(key)
        return tuple(victims)

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)

    def restore(self, undeleted: Files) -> None:
        for key, size in undeleted:
            if key not in self._sizes:
                self._sizes[key] = size
                self.num_bytes += size

    def check(self) -> None:
        assert self.num_bytes == sum(self._sizes.values())
        assert self._writing <= set(self._sizes) and self._doomed <= self._writing


class HostPages:
    """States of host tier pages.

        take             name                 pin
    FREE ----> PINNED ---------> NAMED, IDLE ------> NAMED, PINNED     pinned: in use by a copy or
     ^           |  (nameless)      |    ^  <------                    file operation, perhaps of
     |  unpin    |                  |           unpin                  a step in flight
     +-----------+ <----------------+
                     evict (least recently used), forget
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low ids first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # LRU order of named, unpinned pages

    @property
    def num_named(self) -> int:
        return len(self._page_of)

    def get(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def key_of(self, page: int) -> bytes | None:
        return self._key_of.get(page)

    def take(self) -> int | None:
        """Take a pinned, nameless page, perhaps evicting one; None if all are pinned."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            key, _ = self._idle.popitem(last=False)
            page = self._page_of.pop(key)
            del self._key_of[page]
        else:
            return None
        self._pins[page] = 1
        return page

    def is_pinned(self, page: int) -> bool:
        return page in self._pins

    def next_to_go(self) -> int | None:
        if self._free or not self._idle:
            return None
        return self._page_of[next(iter(self._idle))]

    def name(self, page: int, key: bytes) -> None:
        """Name `page`, valid after the copy that pins it."""
        assert page in self._pins and page not in self._key_of and key not in self._page_of
        self._page_of[key], self._key_of[page] = page, key

    def pin(self, page: int) -> None:
        key = self._key_of[page]
        self._pins[page] = self._pins.get(page, 0) + 1
        self._idle.pop(key, None)

    def unpin(self, page: int) -> None:
        """End an operation; named pages become evictable, nameless ones free."""
        self._pins[page] -= 1
        if self._pins[page] > 0:
            return
        del self._pins[page]
        key = self._key_of.get(page)
        if key is None:
            self._free.append(page)
        else:
            self._idle[key] = None

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark used; pass a chain from its end, to evict that first."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

    def forget_all(self) -> None:
        for key, page in self._page_of.items():
            del self._key_of[page]
            if key in self._idle:
                self._free.append(page)
        self._page_of.clear()
        self._idle.clear()

    def check(self) -> None:
        idle = [self._page_of[key] for key in self._idle]
        assert sorted([*self._free, *idle, *self._pins]) == list(range(self.num_pages)), "host pages: lost or doubled"
        assert all(count > 0 for count in self._pins.values())
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert set(self._idle) == {key for key, page in self._page_of.items() if page not in self._pins}


class DiskTier:
    def __init__(
        self,
        index: DiskIndex,
        *,
        pages: HostPages,
        keys: RequestKeys,
        prefetch_policy: str,
        prefetch_timeout_s: float,
        counters: dict[str, int],
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
        """Read pages up to the first without a file."""
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
        """True while `request` waits for files, within a timeout."""
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
        """Reads may overtake."""
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
