"""A storage's work for the tier, by threads that read and threads that write.

A bad page, disk or store fails a transfer, never a request, and blocks no loop.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

from engine.core.mem_cache.storage_tier import (
    Files,
    PageClear,
    PageDelete,
    PageLookup,
    PageRead,
    PageWrite,
    StorageDone,
    StorageTier,
    StorageWork,
)
from engine.loop.listeners import LoopListener


class BadPage(ValueError):
    """The value is not the page of its key."""


class NoRoom(OSError):
    """A store that works takes no more."""


Outcome = Exception | None  # None: done; FileNotFoundError: not stored; BadPage; other errors
PageView = Callable[[int], memoryview]  # writable bytes of a host page


class PageStore(Protocol):
    """`batch`: most pages of a call. Calls of the two threads overlap."""

    batch: int

    def find(self, work: PageLookup) -> tuple[bytes, ...]:
        """Return stored keys. Raises OSError."""

    def read(self, works: Sequence[PageRead]) -> list[Outcome]:
        """Fill host pages; those of failed ones are undefined."""

    def write(self, works: Sequence[PageWrite]) -> list[Outcome]:
        """After deletion of victims."""

    def delete(self, work: PageDelete) -> Files:
        """(key, bytes) of pages that could not be deleted."""

    def clear(self, work: PageClear) -> None: ...

    def close(self) -> None: ...


class Breaker:
    """Closed -> open for `pause_s` after an error, or a call beyond `patience_s` -> one more try.

    Pure; each thread owns its entry of `_begun`.
    """

    def __init__(self, *, patience_s: float = math.inf, pause_s: float = 0.0) -> None:
        self._patience_s = patience_s
        self._pause_s = pause_s
        self._begun: dict[str, float] = {}
        self._until_s = -math.inf
        self.num_opened = 0

    def is_open(self, now_s: float) -> bool:
        if any(now_s - begun_s >= self._patience_s for begun_s in list(self._begun.values())):
            self._open(now_s)
        return now_s < self._until_s

    def begin(self, thread: str, now_s: float) -> None:
        self._begun[thread] = now_s

    def end(self, thread: str, now_s: float, *, ok: bool) -> None:
        late = now_s - self._begun.pop(thread) >= self._patience_s
        if late or not ok:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self.num_opened += self._pause_s > 0 and now_s >= self._until_s
        self._until_s = max(self._until_s, now_s + self._pause_s)


log = logging.getLogger(__name__)

END_S = 2.0
KEEP = 0.9  # weight of a call beside the next one in the rate of reads
READS, WRITES = "hicache-read", "hicache-write"


class PageStorage(LoopListener):
    """`when_done` is called in a thread. While the breaker is open all work fails at once.

    `place`: URL. Without `threads` another calls `take` and `do`.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        tier: StorageTier,
        when_done: Callable[[], None],
        breaker: Breaker | None = None,
        place: str = "",
        now_s: Callable[[], float] = time.monotonic,
        threads: bool = True,
    ) -> None:
        self.place = place
        self._store = store
        self._tier = tier
        self._when_done = when_done
        self._breaker = breaker or Breaker()
        self._now_s = now_s
        self._done: queue.SimpleQueue[StorageDone] = queue.SimpleQueue()
        self._queues: dict[str, queue.SimpleQueue[StorageWork | None]]
        self._queues = {name: queue.SimpleQueue() for name in (READS, WRITES)}
        self._closing = threading.Event()
        self._fails = dict.fromkeys(self._queues, False)  # the last call did; owned by the thread
        names = tuple(self._queues) if threads else ()
        self._read_bytes, self._read_s = 0.0, 0.0  # recent; owned by the reading thread
        self._threads = [threading.Thread(target=self._run, args=(name,), name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    # ---- the loop's thread

    def on_turn(self, now_s: float) -> None:
        if self._breaker.is_open(self._now_s()):
            for name in self._queues:
                self._fail(self._gather(name, math.inf))
            self._tier.note_pauses(self._breaker.num_opened)
        for done in self.poll():
            self._tier.on_done(done)
        for work in self._tier.take_work():
            self.submit(work)

    def waits_for_outside(self) -> bool:
        return self._tier.busy

    def submit(self, work: StorageWork) -> None:
        self._queues[READS if isinstance(work, PageRead | PageLookup) else WRITES].put(work)

    def poll(self) -> list[StorageDone]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def gauges(self) -> dict[str, float]:
        return {"storage_read_gb_s": self._read_bytes / self._read_s / 1e9 if self._read_s else 0.0}

    def close(self) -> None:
        """Write queued pages for at most END_S per thread."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(END_S)
        self._closing.set()
        if not self._breaker.is_open(self._now_s()):  # or its own farewell would take long
            self._store.close()

    # ---- threads

    def _run(self, name: str) -> None:
        while batch := self.take(name):
            if self._closing.is_set():
                return
            self.do(name, batch)

    def take(self, name: str, *, wait: bool = True) -> list[StorageWork]:
        """Begin a call; []: at the end, or nothing is there."""
        while batch := self._gather(name, self._store.batch, wait=wait):
            if not self._breaker.is_open(now_s := self._now_s()):
                self._breaker.begin(name, now_s)
                break
            self._fail(batch)
            self._when_done()
        return batch

    def do(self, name: str, batch: Sequence[StorageWork]) -> None:
        ok = True
        for _, alike in groupby(batch, type):
            works, begun_s = list(alike), self._now_s()
            try:
                outcomes = self._outcomes(works)
            except Exception as error:  # a thread that ends would leave requests waiting for ever
                if not isinstance(error, OSError):
                    log.exception("hierarchical cache: %s failed", type(works[0]).__name__)
                outcomes = [error] * len(works)
            if isinstance(works[0], PageRead):
                self._note_reads(works, outcomes, self._now_s() - begun_s)
            for work, outcome in zip(works, outcomes, strict=True):
                ok = ok and not self._is_failure(name, outcome)
                self._done.put(outcome if isinstance(outcome, StorageDone) else self._result(work, outcome))
        self._fails[name] = not ok
        self._breaker.end(name, self._now_s(), ok=ok)
        self._when_done()

    def _note_reads(self, works: list[Any], outcomes: Sequence[object], taken_s: float) -> None:
        size = sum(w.identity.bytes_of(w.key) for w, outcome in zip(works, outcomes, strict=True) if outcome is None)
        if size:
            self._read_bytes, self._read_s = KEEP * self._read_bytes + size, KEEP * self._read_s + taken_s

    def _gather(self, name: str, most: float, *, wait: bool = False) -> list[StorageWork]:
        waiting, batch = self._queues[name], list[StorageWork]()
        while len(batch) < most and (wait or not waiting.empty()):
            try:
                work = waiting.get(block=wait)
            except queue.Empty:
                break
            wait = False
            if work is None:
                waiting.put(None)  # for the next call
                break
            batch.append(work)
        return batch

    def _fail(self, batch: Sequence[StorageWork]) -> None:
        for work in batch:
            self._done.put(StorageDone(work, ok=False))

    def _outcomes(self, works: list[Any]) -> Sequence[Outcome | StorageDone]:
        match works[0]:
            case PageRead():
                return self._store.read(works)
            case PageWrite():
                return self._write(works)
            case PageLookup():
                return [StorageDone(work, ok=True, found=self._store.find(work)) for work in works]
            case PageDelete():
                return [StorageDone(work, ok=True, undeleted=self._store.delete(work)) for work in works]
        for work in works:
            self._store.clear(work)
        return [None] * len(works)

    def _write(self, works: Sequence[PageWrite]) -> list[Outcome | StorageDone]:
        found = list[Outcome | StorageDone]()
        for work in works:
            undeleted = self._store.delete(PageDelete(work.victims)) if work.victims else ()
            found.append(StorageDone(work, ok=False, undeleted=undeleted) if undeleted else None)
        tried = iter(self._store.write([work for work, done in zip(works, found, strict=True) if done is None]))
        return [next(tried) if done is None else done for done in found]

    def _is_failure(self, name: str, outcome: Outcome | StorageDone) -> bool:
        """A full disk is one line, not one per page."""
        if not isinstance(outcome, Exception) or isinstance(outcome, FileNotFoundError):
            return False
        if name == WRITES and not self._fails[name]:
            log.warning("hierarchical cache: pages cannot be written: %s", outcome)
        elif not isinstance(outcome, BadPage) and not self._fails[name]:
            log.warning("hierarchical cache: pages cannot be read: %s", outcome)
        self._fails[name] = True
        return not isinstance(outcome, BadPage | NoRoom)

    def _result(self, work: StorageWork, outcome: Outcome) -> StorageDone:
        """A bad page is deleted; of a write, from ranks that could write it."""
        if not isinstance(outcome, BadPage) or not isinstance(work, PageRead | PageWrite):
            return StorageDone(work, ok=outcome is None)
        reads = isinstance(work, PageRead)
        if reads:
            log.warning("hierarchical cache: page %s is deleted: %s", work.key.hex(), outcome)
        undeleted = self._store.delete(PageDelete((work.key,), work.identity))
        return StorageDone(work, ok=False, bad=reads, undeleted=undeleted)
