"""Disk threads for reads and for writes. A bad file or disk fails a transfer, never a request."""

import logging
import queue
import threading
from collections.abc import Callable

from engine.core.disk_index import DiskDelete, DiskDone, DiskRead, DiskWork, DiskWrite
from engine.core.disk_tier import DiskTier
from engine.hicache.page_file import BadFile
from engine.hicache.page_store import PageStore

log = logging.getLogger(__name__)

END_S = 2.0


class Disk:
    """`when_done` is called in a disk thread."""

    def __init__(self, store: PageStore, *, tier: DiskTier, when_done: Callable[[], None]) -> None:
        self._store = store
        self._tier = tier
        self._when_done = when_done
        self._done: queue.SimpleQueue[DiskDone] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[DiskWork | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[DiskWork | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._write_fails = False  # the last one failed; owned by the writing thread
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"hicache-{name}", daemon=True)
            for name, work in (("read", self._reads), ("write", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def turn(self) -> None:
        for done in self.poll():
            self._tier.on_done(done)
        for work in self._tier.take_work():
            self.submit(work)

    @property
    def busy(self) -> bool:
        return self._tier.busy

    def submit(self, work: DiskWork) -> None:
        (self._reads if isinstance(work, DiskRead) else self._writes).put(work)

    def poll(self) -> list[DiskDone]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        """Write queued pages for at most END_S per thread."""
        for work in (self._reads, self._writes):
            work.put(None)
        for thread in self._threads:
            thread.join(END_S)
        self._closing.set()
        self._store.close()

    def _run(self, queue_: "queue.SimpleQueue[DiskWork | None]") -> None:
        while (work := queue_.get()) is not None and not self._closing.is_set():
            self._done.put(self._do(work))
            self._when_done()

    def _do(self, work: DiskWork) -> DiskDone:
        try:
            match work:
                case DiskRead():
                    return self._read(work)
                case DiskWrite():
                    return self._write(work)
                case DiskDelete(keys):
                    return DiskDone(work, ok=True, undeleted=self._store.delete(keys))
        except Exception:  # a thread that ends would leave requests waiting for ever
            log.exception("hierarchical cache: %s failed", type(work).__name__)
            return DiskDone(work, ok=False)

    def _read(self, work: DiskRead) -> DiskDone:
        try:
            self._store.read(work)
            return DiskDone(work, ok=True)
        except FileNotFoundError:
            return DiskDone(work, ok=False)
        except (BadFile, OSError) as error:
            log.warning("hierarchical cache: %s.kv is deleted: %s", work.key.hex(), error)
            return DiskDone(work, ok=False, bad=True, undeleted=self._store.delete((work.key,)))

    def _write(self, work: DiskWrite) -> DiskDone:
        if undeleted := self._store.delete(work.victims):
            return DiskDone(work, ok=False, undeleted=undeleted)
        try:
            self._store.write(work)
            self._write_fails = False
            return DiskDone(work, ok=True)
        except OSError as error:
            if not self._write_fails:  # a full disk is one line, not one per page
                log.warning("hierarchical cache: pages cannot be written: %s", error)
            self._write_fails = True
            return DiskDone(work, ok=False, undeleted=self._store.delete((work.key,)))  # from ranks that could write it
