"""KV prefixes below the device: pages in host memory, and files behind them (DiskTier). Which are copied where, and when.

        device page                    host page                     file
    on_cached, on_read, on_evict --> copied out (plan.to_host) --> written
    admission, load_ahead <------ copied back (plan.from_host) <-- read while the request waits

Pages are found by their chained keys (engine/core/page_keys.py). Copies run in the stream in the order of plans, so a device
page may have a new owner as soon as its copy is planned: every owner writes pages through the same stream. (On decode workers
peers write pages outside it: they have no host tier. A peer that brings or gets a prefix waits until its pages are settled.) A host
page is pinned until its copy has been collected.

After SGLang's HiCache.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from engine.core.disk_index import DiskIndex
from engine.core.disk_tier import DiskTier
from engine.core.host_pages import HostPages
from engine.core.page_keys import KVIdentity, RequestKeys
from engine.core.plan import PageCopy, Plan
from engine.core.radix_node import Node
from engine.core.request import LoadedAhead, Request

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
USES_TO_WRITE = {"write_through": 1, "write_through_selective": 2}  # requests that computed or read a node
TIERS = ("device", "host", "disk")


class HostCache:
    """Policies as the flags of these names. `run_id`: of RequestKeys. `ahead_pages`: that a step loads for requests that wait."""

    def __init__(
        self,
        *,
        num_pages: int,
        identity: KVIdentity,
        run_id: str = "",
        write_policy: str = "write_through",
        disk: DiskIndex | None = None,
        prefetch_policy: str = "best_effort",
        prefetch_timeout_s: float = 1.0,
        ahead_pages: int = 0,
    ) -> None:
        assert write_policy in WRITE_POLICIES and prefetch_policy in PREFETCH_POLICIES
        self.pages = HostPages(num_pages)
        self.counters: Counter[str] = Counter()
        self.keys = RequestKeys(identity, run_id=run_id)
        self._writes_back = write_policy == "write_back"
        self._uses_to_write = USES_TO_WRITE.get(write_policy)
        self._out: list[PageCopy] = []  # requested since the last plan
        self._in: list[PageCopy] = []
        self._under_way: dict[int, list[PageCopy]] = {}  # of the plans that are not collected, by their number
        self._ahead_pages = self.pages_ahead_left = ahead_pages
        self.disk: DiskTier | None = None
        if disk is not None:
            self.disk = DiskTier(
                disk,
                pages=self.pages,
                keys=self.keys,
                prefetch_policy=prefetch_policy,
                prefetch_timeout_s=prefetch_timeout_s,
                counters=self.counters,
            )

    def use_identity(self, identity: KVIdentity) -> None:
        """Name pages for other weights from now on. Call it after `forget`."""
        assert self.pages.num_named == 0
        self.keys.identity = identity

    # ---- events of the tree

    def on_cached(self, node: Node) -> None:
        self._write_when_used(node)

    def on_read(self, node: Node) -> None:
        """Take note of an admitted request that reads the path to `node`."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            path.append(at)
            at = at.parent
        for above in reversed(path):
            self._write_when_used(above)
        self._touch([key for above in reversed(path) for key in above.keys])

    def on_evict(self, node: Node) -> None:
        """Request copies of its pages, which the next planned step may write behind these copies."""
        if self._writes_back:
            self._copy_out(node)

    def _write_when_used(self, node: Node) -> None:
        if self._uses_to_write is not None and node.uses >= self._uses_to_write:
            self._copy_out(node)

    def _copy_out(self, node: Node) -> None:
        """Copy the pages that are not on the host, front first: a chain without its front is never found."""
        for key, page in zip(node.keys, node.pages, strict=True):
            if self.pages.get(key) is not None:
                continue
            host_page = self.pages.take()
            if host_page is None:
                self.counters["hicache_skipped_pages"] += 1
                return
            if self.disk is not None:
                self.disk.on_reuse(host_page)
            self.pages.name(host_page, key)
            self._out.append(PageCopy(page=page, host_page=host_page))
            self.counters["hicache_saved_pages"] += 1

    def _touch(self, chain: list[bytes]) -> None:
        self.pages.touch(reversed(chain))
        if self.disk is not None:
            self.disk.index.touch(reversed(chain))

    # ---- admission

    def prefetch(self, request: Request, *, start: int, end: int) -> None:
        """Start to read pages `start`..`end` of the request's tokens from files, up to the first gap."""
        if self.disk is not None:
            keys = self.keys.of(request, end)
            self._touch(keys)  # or its own front would go for its end
            self.disk.prefetch(request, keys[start:])

    def find(self, request: Request, *, start: int, end: int) -> list[int]:
        """Return the host pages of pages `start`.. of the request, up to the first gap.

        Each is pinned until a step that copies it (`load`) has been collected.
        """
        found = list[int]()
        for key in self.keys.of(request, end)[start:]:
            page = self.pages.get(key)
            if page is None:
                break
            self.pages.pin(page)
            found.append(page)
        return found

    def load(self, request: Request, host_pages: list[int], *, start: int) -> None:
        """Copy what `find` returned into the request's pages `start`..; count the hits of each tier at its admission."""
        num_read = self._load(request, request.pages[start : start + len(host_pages)], host_pages, start=start)
        ahead, request.lower_tiers.ahead = request.lower_tiers.ahead, LoadedAhead()
        if not request.admitted:
            size = self.keys.identity.page_size
            num_ahead = max(0, min(start, ahead.end) - ahead.begin)  # of the `start` pages on the device
            num_read += min(ahead.num_read, num_ahead)
            split = (start - num_ahead, len(host_pages) + num_ahead - num_read, num_read)
            request.cached_by_tier = [pages * size for pages in split]
            for tier, tokens in zip(TIERS, request.cached_by_tier, strict=True):
                self.counters[f"hicache_{tier}_hit_tokens"] += tokens

    def holds(self, request: Request, index: int) -> bool:
        """Whether page `index` of the request is on the host."""
        return self.pages.get(self.keys.of(request, index + 1)[index]) is not None

    def load_ahead(self, request: Request, pages: list[int], host_pages: list[int], *, start: int) -> None:
        """Copy what `find` returned into `pages`, which are pages `start`.. of a request that waits."""
        num_read = self._load(request, pages, host_pages, start=start)
        self.pages_ahead_left -= len(pages)
        self.counters["hicache_loaded_ahead_pages"] += len(pages)
        ahead, end = request.lower_tiers.ahead, start + len(pages)
        begin = ahead.begin if ahead.end == start else start
        request.lower_tiers.ahead = LoadedAhead(begin, end, ahead.num_read + num_read)

    def _load(self, request: Request, pages: list[int], host_pages: list[int], *, start: int) -> int:
        """Request the copies; return how many of the pages were read from files and not used since."""
        self._in += [PageCopy(page, host_page) for page, host_page in zip(pages, host_pages, strict=True)]
        self._touch(self.keys.of(request, start + len(host_pages)))
        self.counters["hicache_loaded_pages"] += len(host_pages)
        return 0 if self.disk is None else self.disk.take_read(host_pages)

    # ---- steps

    @property
    def asks_for_a_step(self) -> bool:
        return bool(self._out or self._in)

    def attach(self, plan: Plan) -> None:
        """Put every copy requested since the last plan into this one."""
        plan.to_host, self._out = self._out, []
        plan.from_host, self._in = self._in, []
        if plan.to_host or plan.from_host:
            self._under_way[plan.seq] = [*plan.to_host, *plan.from_host]
        self.pages_ahead_left = self._ahead_pages

    def on_collected(self, plan: Plan) -> None:
        """Unpin the copies of a collected step, and write the pages that have reached the host to disk."""
        self._under_way.pop(plan.seq, None)
        for copy in reversed(plan.from_host):
            self.pages.unpin(copy.host_page)
        to_write = [] if self.disk is None else self.disk.write(copy.host_page for copy in plan.to_host)
        for host_page in to_write:
            self.pages.pin(host_page)
        for copy in reversed(plan.to_host):
            self.pages.unpin(copy.host_page)

    def is_settled(self, pages: Sequence[int]) -> bool:
        """Whether no copy of one of these device pages is requested or under way: a peer may read and write them."""
        copies = chain(self._out, self._in, *self._under_way.values())
        return {copy.page for copy in copies}.isdisjoint(pages)

    # ---- all of it

    def forget(self, *, files: bool) -> None:
        """Forget every page; `files`: delete the folder's files, too. No step may be in flight."""
        for copy in [*self._out, *self._in]:
            self.pages.unpin(copy.host_page)
        self._out, self._in = [], []
        self.pages.forget_all()
        if self.disk is not None:
            self.disk.forget(files=files)

    def gauges(self) -> dict[str, float]:
        size = self.keys.identity.page_size
        host = {
            "hicache_host_used_tokens": float(self.pages.num_named * size),
            "hicache_host_total_tokens": float(self.pages.num_pages * size),
        }
        return host if self.disk is None else host | self.disk.gauges()

    def check(self) -> None:
        self.pages.check()
        copied = {copy.host_page for copy in [*self._out, *self._in]}
        assert all(self.pages.is_pinned(page) for page in copied), "a host page that is being copied is not pinned"
        if self.disk is not None:
            self.disk.check()
