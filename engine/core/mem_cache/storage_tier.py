"""KV prefixes in files or a shared store: host pages to write, pages to read for waiting requests.

  write (its copy is collected)    host page --> PageWrite
  prefetch (its request waits)     host page <-- (PageLookup) PageRead

`awaits`: to skip the request. Threads run `take_work` and report to `on_done`. Host pages in use
are pinned. Reads and writes take at most half of the host tier each.

A state is a page of another size, numbered after all pages, and in a chain after its last page.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.core.mem_cache.page_allocator import KVIdentity, is_state, next_keys, state_key
from engine.core.request import Request


class RequestKeys:
    """Cached page keys of requests. `grid`: of states.

      seed = H(identity of the KV, branch)     key[0] = H(seed, tokens of page 0)
      key[i] = H(key[i-1], tokens of page i)

    SHA-256, as a deliberate collision would read another client's KV.
    """

    def __init__(self, identity: KVIdentity, *, grid: int = 0) -> None:
        self.identity = identity
        self._pages_a_state = grid // identity.page_size

    def of(self, request: Request, num_pages: int) -> list[bytes]:
        size, known = self.identity.page_size, request.lower_tiers
        seed = self.identity.seed(request.variant.digest, request.message.namespace)
        if known.seed != seed:
            known.keys, known.seed = [], seed
        keys = known.keys
        if len(keys) < num_pages:
            tokens = request.key_tokens(len(keys) * size, num_pages * size)
            keys += next_keys(keys[-1] if keys else seed, tokens, size)
        return keys[:num_pages]

    def chain(self, request: Request, start: int, end: int) -> list[bytes]:
        """Keys of pages `start`..`end` - 1 and possible states."""
        pages, every = self.of(request, end), self._pages_a_state
        if not every:
            return pages[start:]
        ends = ((key, number % every == 0) for number, key in enumerate(pages[start:], start + 1))
        return [part for key, at_state in ends for part in ((key, state_key(key)) if at_state else (key,))]

    def usable(self, chain: Sequence[bytes], has: Callable[[bytes], bool]) -> list[bytes]:
        """Pages up to a gap; with states to the last, inclusive."""
        pages = list(takewhile(has, (key for key in chain if not is_state(key))))
        if not self._pages_a_state:
            return pages
        at = chain.index(pages[-1]) + 2 if pages else 0
        state = next((key for key in reversed(chain[:at]) if is_state(key) and has(key)), None)
        return [] if state is None else [*pages[: pages.index(state[:-1]) + 1], state]


@dataclass(slots=True, frozen=True)
class PageRead:
    key: bytes
    host_page: int
    identity: KVIdentity


@dataclass(slots=True, frozen=True)
class PageWrite:
    """Delete `victims`, then write `host_page`."""

    key: bytes
    host_page: int
    identity: KVIdentity
    victims: tuple[bytes, ...] = ()


@dataclass(slots=True, frozen=True)
class PageDelete:
    keys: tuple[bytes, ...]
    identity: KVIdentity | None = None  # of pages in a shared store


@dataclass(slots=True, frozen=True)
class PageLookup:
    """A search for `keys`."""

    keys: tuple[bytes, ...]
    identity: KVIdentity


@dataclass(slots=True, frozen=True)
class PageClear:
    """Delete all pages of `identity`, of other workers too."""

    identity: KVIdentity


StorageWork = PageRead | PageWrite | PageDelete | PageLookup | PageClear
Files = tuple[tuple[bytes, int], ...]  # (key, bytes)


@dataclass(slots=True, frozen=True)
class StorageDone:
    """Not tried with `undeleted` victims; a failed read deleted its file, `bad` if corrupt.

    `found`: by a lookup.
    """

    work: StorageWork
    ok: bool
    bad: bool = False
    undeleted: Files = ()
    found: tuple[bytes, ...] = ()


class StorageIndex:
    """Known stored pages: none of a store that workers share.

    `asks`: reads follow a lookup. `wait_s`: most for a read.
    """

    asks = True

    def __init__(self, *, wait_s: float) -> None:
        self.wait_s = wait_s
        self._writing: set[bytes] = set()
        self._doomed: set[bytes] = set()  # being written, to be deleted then

    def has(self, key: bytes) -> bool:
        return key not in self._doomed

    def holds(self, key: bytes) -> bool:
        """True if a write of the page is needless."""
        return key in self._writing

    def touch(self, keys: Iterable[bytes]) -> None: ...

    def begin_write(self, key: bytes) -> tuple[bytes, ...] | None:
        """Return pages to delete first, or None: no room, or it exists."""
        self._writing.add(key)
        return ()

    def end_write(self, work: PageWrite, *, ok: bool, undeleted: Files) -> PageDelete | None:
        """Return the page to delete if cleared meanwhile."""
        self._writing.remove(work.key)
        if work.key not in self._doomed:
            return None
        self._doomed.remove(work.key)
        return PageDelete((work.key,), work.identity)

    def begin_read(self, key: bytes) -> None: ...

    def end_read(self, key: bytes, *, ok: bool, undeleted: Files) -> None: ...

    def clear(self, identity: KVIdentity) -> StorageWork:
        """Forget all pages; one being written is deleted later."""
        self._doomed |= self._writing
        return PageClear(identity)

    def restore(self, undeleted: Files) -> None: ...

    def gauges(self) -> dict[str, float]:
        return {}

    def check(self) -> None:
        assert self._doomed <= self._writing


class FileIndex(StorageIndex):
    """Index of files in LRU order; delete `excess` first.

    A write counts from its decision, a file until its reported deletion, and victims are deleted
    before the write: bytes on disk never exceed the limit.
    """

    asks = False

    def __init__(
        self, *, max_bytes: int, file_bytes: int, state_bytes: int = 0, files: Iterable[tuple[bytes, int]] = ()
    ) -> None:
        super().__init__(wait_s=math.inf)
        self._max_bytes = max_bytes
        self._file_bytes = {False: file_bytes, True: state_bytes}
        self._sizes: OrderedDict[bytes, int] = OrderedDict(files)  # least recently used first
        self._reading: set[bytes] = set()
        self.num_bytes = sum(self._sizes.values())
        self.excess = self._make_room(0) or ()

    @property
    def num_files(self) -> int:
        return len(self._sizes)

    def has(self, key: bytes) -> bool:
        return key in self._sizes and key not in self._writing

    def holds(self, key: bytes) -> bool:
        return key in self._sizes

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def begin_write(self, key: bytes) -> tuple[bytes, ...] | None:
        if key in self._sizes:
            return None
        size = self._file_bytes[is_state(key)]
        victims = self._make_room(size)
        if victims is None:
            return None
        self._sizes[key] = size
        self.num_bytes += size
        self._writing.add(key)
        return victims

    def end_write(self, work: PageWrite, *, ok: bool, undeleted: Files) -> PageDelete | None:
        doomed = super().end_write(work, ok=ok, undeleted=undeleted)
        if doomed or not ok:
            self._drop(work.key)
        self.restore(undeleted)
        return PageDelete((work.key,)) if doomed and ok else None

    def begin_read(self, key: bytes) -> None:
        assert self.has(key)
        self._reading.add(key)

    def end_read(self, key: bytes, *, ok: bool, undeleted: Files) -> None:
        self._reading.discard(key)
        if not ok:
            self._drop(key)
            self.restore(undeleted)

    def clear(self, identity: KVIdentity) -> StorageWork:
        self._doomed |= self._writing
        keys = tuple(key for key in self._sizes if key not in self._writing)
        for key in keys:
            self._drop(key)
        return PageDelete(keys)

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

    def gauges(self) -> dict[str, float]:
        return {"hicache_disk_used_bytes": float(self.num_bytes), "hicache_disk_files": float(self.num_files)}

    def check(self) -> None:
        assert self.num_bytes == sum(self._sizes.values())
        assert self._writing <= set(self._sizes) and self._doomed <= self._writing


class HostPages:
    """States of host tier pages.

    FREE --take--> PINNED (nameless) --name--> NAMED, IDLE <--pin, unpin--> NAMED, PINNED
    PINNED --unpin--> FREE
    NAMED, IDLE --evict (least recently used), forget--> FREE

    Pinned: in use by a copy or file operation, perhaps of a step in flight.
    """

    def __init__(self, num_pages: int, *, first: int = 0) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self.first = first
        self._free = list(range(first + num_pages - 1, first - 1, -1))  # popped from the end: low ids first
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
        """Take a pinned, nameless page, perhaps evicted; None if all are pinned."""
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
        numbers = list(range(self.first, self.first + self.num_pages))
        assert sorted([*self._free, *idle, *self._pins]) == numbers, "host pages: lost or doubled"
        assert all(count > 0 for count in self._pins.values())
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert set(self._idle) == {key for key, page in self._page_of.items() if page not in self._pins}


class StorageTier:
    def __init__(
        self,
        index: StorageIndex,
        *,
        pages: HostPages,
        states: HostPages | None,
        keys: RequestKeys,
        prefetch_policy: str,
        prefetch_timeout_s: float,
        counters: dict[str, int],
    ) -> None:
        self.index = index
        self._pages = pages
        self._states = states
        self._keys = keys
        waits = {"best_effort": 0.0, "timeout": min(prefetch_timeout_s, index.wait_s)}
        self.wait_s = waits.get(prefetch_policy, index.wait_s)
        self._counters = counters
        self._max_pending = max(1, pages.num_pages // 2)
        self._reading: dict[bytes, int] = {}  # key -> host page being filled
        self._asking: dict[PageLookup, list[tuple[Request, Sequence[bytes]]]] = {}
        self._from_storage: set[int] = set()  # host pages read, unused since
        self._num_writing = 0
        self._work: list[StorageWork] = []

    def _of(self, key: bytes) -> HostPages:
        return self._states if self._states is not None and is_state(key) else self._pages

    def _at(self, host_page: int) -> HostPages:
        return self._pages if self._states is None or host_page < self._states.first else self._states

    # ---- writes

    def write(self, host_pages: Iterable[int]) -> list[int]:
        """Start writes; return host pages to pin."""
        chosen: list[tuple[bytes, int]] = []
        for page in host_pages:
            key = self._at(page).key_of(page)
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
        self._work.append(PageWrite(key, host_page, self._keys.identity, victims))
        return True

    # ---- reads

    def prefetch(self, request: Request, keys: Sequence[bytes]) -> None:
        """Read what is usable."""
        lacking = [key for key in keys if self._of(key).get(key) is None]
        if not self.index.asks or all(key in self._reading for key in lacking):
            return self._read(request, keys, self.index.has)
        lookup = PageLookup(tuple(lacking[: self._max_pending]), self._keys.identity)
        if lookup not in self._asking:
            self._asking[lookup] = []
            self._work.append(lookup)
        self._asking[lookup].append((request, keys))
        request.lower_tiers.prefetching = lacking

    def _on_looked_up(self, done: StorageDone, work: PageLookup) -> None:
        found = frozenset(done.found)
        for request, keys in self._asking.pop(work, ()):  # none once they are forgotten
            over = request.admitted or request.finish is not None
            self._read(request, () if over else keys, found.__contains__)

    def _read(self, request: Request, keys: Sequence[bytes], stored: Callable[[bytes], bool]) -> None:
        def has(key: bytes) -> bool:
            return key in self._reading or self._of(key).get(key) is not None or stored(key)

        pages = [key for key in self._keys.usable(keys, has) if not is_state(key)]
        reading = frozenset(takewhile(self._comes, pages))
        usable = self._keys.usable(keys, lambda key: key in reading or (is_state(key) and has(key)))
        coming = [key for key in usable if self._comes(key)]
        request.lower_tiers.prefetching = [key for key in coming if key in self._reading]

    def _comes(self, key: bytes) -> bool:
        return self._of(key).get(key) is not None or key in self._reading or self._begin_read(key)

    def _begin_read(self, key: bytes) -> bool:
        if not self.index.has(key) or len(self._reading) >= self._max_pending:
            return False
        pages = self._of(key)
        if pages.next_to_go() in self._from_storage:  # the earlier request keeps its pages
            return False
        host_page = pages.take()
        if host_page is None:
            return False
        self.on_reuse(host_page)
        self.index.begin_read(key)
        self._reading[key] = host_page
        self._work.append(PageRead(key, host_page, self._keys.identity))
        return True

    def awaits(self, request: Request, now_s: float) -> bool:
        tiers = request.lower_tiers
        if not self.wait_s or not tiers.prefetching:
            return False
        comes = any(key in self._reading for key in tiers.prefetching)
        if not comes and not any(r is request for asking in self._asking.values() for r, _ in asking):
            tiers.prefetching = []
            return False
        if tiers.prefetch_until_s is None:
            tiers.prefetch_until_s = now_s + self.wait_s
        return now_s < tiers.prefetch_until_s

    @property
    def busy(self) -> bool:
        return bool(self._reading or self._asking)

    def on_reuse(self, host_page: int) -> None:
        self._from_storage.discard(host_page)

    def take_read(self, host_pages: Iterable[int]) -> int:
        read = self._from_storage.intersection(host_pages)
        self._from_storage -= read
        return len(read)

    # ---- threads

    def take_work(self) -> list[StorageWork]:
        """Reads may overtake."""
        work, self._work = self._work, []
        return work

    def note_pauses(self, count: int) -> None:
        self._counters["hicache_storage_pauses"] = count

    def on_done(self, done: StorageDone) -> None:
        match done.work:
            case PageRead():
                self._on_read(done, done.work)
            case PageWrite():
                self._on_written(done, done.work)
            case PageLookup():
                self._on_looked_up(done, done.work)
            case PageDelete():
                self.index.restore(done.undeleted)

    def _on_read(self, done: StorageDone, work: PageRead) -> None:
        self.index.end_read(work.key, ok=done.ok, undeleted=done.undeleted)
        self._counters["hicache_bad_files"] += done.bad
        wanted = self._reading.get(work.key) == work.host_page  # False if all was forgotten meanwhile
        if wanted:
            del self._reading[work.key]
        pages = self._of(work.key)
        if wanted and done.ok and pages.get(work.key) is None:
            pages.name(work.host_page, work.key)
            self._from_storage.add(work.host_page)
            self._counters["hicache_read_pages"] += 1
        pages.unpin(work.host_page)

    def _on_written(self, done: StorageDone, work: PageWrite) -> None:
        self._num_writing -= 1
        self._counters["hicache_written_pages" if done.ok else "hicache_failed_writes"] += 1
        if delete := self.index.end_write(work, ok=done.ok, undeleted=done.undeleted):
            self._work.append(delete)
        self._at(work.host_page).unpin(work.host_page)

    # ---- all of it

    def forget(self, *, files: bool) -> None:
        self._reading.clear()
        self._asking.clear()
        self._from_storage.clear()
        if files:
            self._work.append(self.index.clear(self._keys.identity))

    def gauges(self) -> dict[str, float]:
        pending = self._num_writing + len(self._reading) + len(self._asking)
        return {"hicache_disk_pending": float(pending), **self.index.gauges()}

    def check(self) -> None:
        keys = [self._at(page).key_of(page) for page in self._from_storage]
        pinned = [self._of(key).is_pinned(page) for key, page in self._reading.items()]
        assert all(pinned) and all(key is not None for key in keys), "a page that is read is not pinned, or has no key"
        self.index.check()
