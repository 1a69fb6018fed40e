"""KV prefixes below the device: pages in host memory, and files on disk. Which are copied where, and when.

        device page                    host page                     file
    on_cached, on_read, on_evict --> copied out (plan.to_host) --> written (DiskWrite)
    admission <------------------ copied back (plan.from_host) <-- read while the request waits (DiskRead)

It owns host page ids and the disk index; it must not know bytes, files, threads or clocks. Pages are found by their
chained keys (engine/core/page_keys.py), whichever tiers they are in. Copies run in the stream, in the order in which
plans ask for them: a device page may have a new owner as soon as its copy is planned, because whoever owns pages here
writes them through the same stream. (Decode's pages are written by peers, who do not wait for it: no host tier there.)
A host page is another matter: disk threads write it, so it is pinned until its copy has been collected.

After SGLang's HiCache: write policies, prefetch policies and their names are theirs.
"""

from collections import Counter
from dataclasses import dataclass

from engine.core.disk_index import DiskDelete, DiskDone, DiskIndex, DiskRead, DiskWork, DiskWrite
from engine.core.host_pages import HostPages
from engine.core.page_keys import KVIdentity, next_keys
from engine.core.plan import PageCopy, Plan
from engine.core.radix_cache import Node
from engine.core.request import Request

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
USES_TO_WRITE = {"write_through": 1, "write_through_selective": 2}  # requests that computed or read a node
TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCacheSettings:
    """Flags of the same names. `prefetch_timeout_s`: of the policy "timeout", from when the request is first judged."""

    write_policy: str = "write_through"
    prefetch_policy: str = "best_effort"
    prefetch_timeout_s: float = 1.0


class HostCache:
    def __init__(
        self,
        *,
        num_pages: int,
        identity: KVIdentity,
        settings: HostCacheSettings,
        disk: DiskIndex | None = None,
        life: str = "",
    ) -> None:
        """`life`: unique name of this process's life: an adapter's number means nothing in another (files outlive us)."""
        assert settings.write_policy in WRITE_POLICIES and settings.prefetch_policy in PREFETCH_POLICIES
        self.pages = HostPages(num_pages)
        self.disk = disk
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._life = life
        self._settings = settings
        self._uses_to_write = USES_TO_WRITE.get(settings.write_policy)
        self._out: list[PageCopy] = []  # asked for since the last plan
        self._in: list[PageCopy] = []
        self._reading: dict[bytes, int] = {}  # key -> host page that is being filled from its file
        self._from_disk: set[int] = set()  # host pages that were read from a file and not used since
        self._num_writing = 0
        self._work: list[DiskWork] = []

    # ---- names

    def keys_of(self, request: Request, num_pages: int) -> list[bytes]:
        """Of its first `num_pages` pages, which are whole. The one place that starts a chain."""
        extra = f"adapter {request.adapter} of {self._life}" if request.adapter else ""
        seed, size = self._identity.seed(extra), self._identity.page_size
        if request.page_keys_seed != seed:
            request.page_keys, request.page_keys_seed = [], seed
        keys = request.page_keys
        if len(keys) < num_pages:
            tokens = request.tokens(len(keys) * size, num_pages * size)
            keys += next_keys(keys[-1] if keys else seed, tokens, size)
        return keys[:num_pages]

    def use_identity(self, identity: KVIdentity) -> None:
        """Other weights: nothing that is kept is found any more. Call it after `forget`."""
        assert self.pages.num_named == 0
        self._identity = identity

    # ---- what the tree says

    def on_cached(self, node: Node) -> None:
        """A new leaf: a request has computed it, or had it loaded."""
        node.uses = 1
        self._write_when_used(node)

    def on_read(self, node: Node) -> None:
        """A request was admitted that reads the path which ends at `node`."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.uses += 1
            path.append(at)
            at = at.parent
        for above in reversed(path):
            self._write_when_used(above)
        self._touch([key for above in reversed(path) for key in above.keys])

    def on_evict(self, node: Node) -> None:
        """Its pages are free after this, and may be written in the next planned step, behind the copies asked for here."""
        if self._settings.write_policy == "write_back":
            self._copy_out(node)

    def _write_when_used(self, node: Node) -> None:
        if self._uses_to_write is not None and node.uses >= self._uses_to_write:
            self._copy_out(node)

    def _copy_out(self, node: Node) -> None:
        """What is not on the host yet, from the front: a chain whose front is missing is never found."""
        for key, page in zip(node.keys, node.pages, strict=True):
            if self.pages.get(key) is not None:
                continue
            host_page = self._take()
            if host_page is None:
                self.counters["hicache_skipped_pages"] += 1
                return
            self.pages.name(host_page, key)
            self._out.append(PageCopy(page=page, host_page=host_page))
            self.counters["hicache_saved_pages"] += 1

    def _take(self) -> int | None:
        page = self.pages.take()
        if page is not None:
            self._from_disk.discard(page)
        return page

    def _touch(self, chain: list[bytes]) -> None:
        self.pages.touch(reversed(chain))
        if self.disk is not None:
            self.disk.touch(reversed(chain))

    # ---- admission

    def find(self, request: Request, *, start: int, end: int) -> list[int]:
        """Pin the host pages that hold pages `start`.. of the request's tokens, as far as they are here without a gap.

        Each is pinned until a step that copies it (`load`) has been collected.
        """
        found = list[int]()
        keys = self.keys_of(request, end)
        for key in keys[start:]:
            page = self.pages.get(key)
            if page is None:
                break
            self.pages.pin(page)
            found.append(page)
        return found

    def load(self, request: Request, host_pages: list[int], *, start: int) -> None:
        """Copy what `find` returned into the request's pages `start`..; counts what each tier gave at its admission."""
        copies = zip(request.pages[start : start + len(host_pages)], host_pages, strict=True)
        self._in += [PageCopy(page=page, host_page=host_page) for page, host_page in copies]
        self._touch(self.keys_of(request, start + len(host_pages)))
        from_disk = self._from_disk.intersection(host_pages)
        self._from_disk -= from_disk
        self.counters["hicache_loaded_pages"] += len(host_pages)
        if not request.admitted:
            size = self._identity.page_size
            split = (start, len(host_pages) - len(from_disk), len(from_disk))
            request.cached_by_tier = [pages * size for pages in split]
            for tier, tokens in zip(TIERS, request.cached_by_tier, strict=True):
                self.counters[f"hicache_{tier}_hit_tokens"] += tokens

    # ---- steps

    @property
    def asks_for_a_step(self) -> bool:
        return bool(self._out or self._in)

    def attach(self, plan: Plan) -> None:
        """Everything asked for since the last plan goes with this one."""
        plan.to_host, self._out = self._out, []
        plan.from_host, self._in = self._in, []

    def on_collected(self, plan: Plan) -> None:
        """The copies of a collected step are made; what has reached the host goes on to the disk."""
        for copy in reversed(plan.from_host):
            self.pages.unpin(copy.host_page)
        for host_page in self._to_write(plan.to_host):
            self.pages.pin(host_page)
        for copy in reversed(plan.to_host):
            self.pages.unpin(copy.host_page)

    # ---- disk

    def _to_write(self, copies: list[PageCopy]) -> list[int]:
        """Decide which of the pages that came to the host are written; at most half of the host waits for that."""
        if self.disk is None:
            return []
        chosen: list[tuple[bytes, int]] = []
        for copy in copies:
            key = self.pages.key_of(copy.host_page)
            if key is None or self.disk.holds(key):
                continue
            if self._num_writing + len(chosen) >= max(1, self.pages.num_pages // 2):
                self.counters["hicache_unwritten_pages"] += 1
                continue
            chosen.append((key, copy.host_page))
        return [page for key, page in reversed(chosen) if self._write(self.disk, key, page)]

    def _write(self, disk: DiskIndex, key: bytes, host_page: int) -> bool:
        victims = disk.begin_write(key)
        if victims is None:
            self.counters["hicache_unwritten_pages"] += 1
            return False
        self._num_writing += 1
        self._work.append(DiskWrite(key, host_page, self._identity, victims))
        return True

    def prefetch(self, request: Request, *, start: int, end: int) -> None:
        """Read pages `start`..`end` of a request's tokens from files into the host, as far as there is no gap."""
        if self.disk is None:
            return
        keys = self.keys_of(request, end)
        self._touch(keys)  # or its own front would go for its end
        wanted = []
        for key in keys[start:]:
            if self.pages.get(key) is not None:
                continue
            if key not in self._reading and not self._read(self.disk, key):
                break
            wanted.append(key)
        request.prefetching = wanted

    def _read(self, disk: DiskIndex, key: bytes) -> bool:
        if not disk.has(key) or len(self._reading) >= max(1, self.pages.num_pages // 2):
            return False
        if self.pages.next_to_go() in self._from_disk:  # who came first keeps what was read for it
            return False
        host_page = self._take()
        if host_page is None:
            return False
        disk.begin_read(key)
        self._reading[key] = host_page
        self._work.append(DiskRead(key, host_page, self._identity))
        return True

    def awaits(self, request: Request, now_s: float) -> bool:
        """Whether `request` is not judged yet, because files are being read for it."""
        if self._settings.prefetch_policy == "best_effort" or not request.prefetching:
            return False
        if not any(key in self._reading for key in request.prefetching):
            request.prefetching = []
            return False
        if self._settings.prefetch_policy == "wait_complete":
            return True
        if request.prefetch_until_s is None:
            request.prefetch_until_s = now_s + self._settings.prefetch_timeout_s
        return now_s < request.prefetch_until_s

    @property
    def busy(self) -> bool:
        """Something is being read that requests may wait for."""
        return bool(self._reading)

    def take_work(self) -> list[DiskWork]:
        """For the disk threads: writes and deletes in this order; reads may overtake them."""
        work, self._work = self._work, []
        return work

    def on_disk(self, done: DiskDone) -> None:
        assert self.disk is not None
        match done.work:
            case DiskRead():
                self._on_read_done(self.disk, done, done.work)
            case DiskWrite():
                self._on_written(self.disk, done, done.work)
            case DiskDelete():
                self.disk.end_delete(done.undeleted)

    def _on_read_done(self, disk: DiskIndex, done: DiskDone, work: DiskRead) -> None:
        disk.end_read(work.key, ok=done.ok, undeleted=done.undeleted)
        self.counters["hicache_bad_files"] += done.bad
        wanted = self._reading.get(work.key) == work.host_page  # or all was forgotten meanwhile
        if wanted:
            del self._reading[work.key]
        if wanted and done.ok and self.pages.get(work.key) is None:
            self.pages.name(work.host_page, work.key)
            self._from_disk.add(work.host_page)
            self.counters["hicache_read_pages"] += 1
        self.pages.unpin(work.host_page)

    def _on_written(self, disk: DiskIndex, done: DiskDone, work: DiskWrite) -> None:
        self._num_writing -= 1
        self.counters["hicache_written_pages" if done.ok else "hicache_failed_writes"] += 1
        if delete := disk.end_write(work, ok=done.ok, undeleted=done.undeleted):
            self._work.append(delete)
        self.pages.unpin(work.host_page)

    # ---- all of it

    def forget(self, *, files: bool) -> None:
        """Nothing is found any more. No step may be in flight. `files`: those of this folder go, too."""
        for copy in [*self._out, *self._in]:
            self.pages.unpin(copy.host_page)
        self._out, self._in = [], []
        self._reading.clear()
        self._from_disk.clear()
        self.pages.forget_all()
        if files and self.disk is not None:
            self._work.append(self.disk.clear())

    def gauges(self) -> dict[str, float]:
        size = self._identity.page_size
        gauges = {
            "hicache_host_used_tokens": float(self.pages.num_named * size),
            "hicache_host_total_tokens": float(self.pages.num_pages * size),
        }
        if self.disk is not None:
            gauges |= {
                "hicache_disk_used_bytes": float(self.disk.num_bytes),
                "hicache_disk_files": float(self.disk.num_files),
                "hicache_disk_pending": float(self._num_writing + len(self._reading)),
            }
        return gauges

    def check(self) -> None:
        """Every host page is free, idle or pinned; every pin has its operation; the disk index adds up."""
        self.pages.check()
        assert all(self.pages.key_of(page) is not None for page in self._from_disk)
        operations = {copy.host_page for copy in [*self._out, *self._in]} | set(self._reading.values())
        assert all(self.pages.is_pinned(page) for page in operations), "a host page that is being copied is not pinned"
        if self.disk is not None:
            self.disk.check()
