"""Prefix KV below the device: host pages, and a storage behind them (StorageTier).

  device page                    host page                     storage
  share, on_read, on_removed --> copied out (plan.to_host) --> written
  admission, load_ahead <------- copied back (plan.from_host) <-- read while the request waits

Pages have chained keys (page_allocator.py). Copies run in plan order on the stream of all page
writes, so a device page may change owner once its copy is planned. Peers write outside it, so get
settled pages. Host pages are pinned until their copy is collected.

States go the same ways.

After SGLang's HiCache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from engine.core.mem_cache.memory_part import LowerTier, MemoryPart
from engine.core.mem_cache.page_allocator import KVIdentity, is_state, state_key
from engine.core.mem_cache.radix_cache import Inserted, Match, Node, TreePart
from engine.core.mem_cache.storage_tier import HostPages, RequestKeys, StorageIndex, StorageTier
from engine.core.memory import Memory, match_limit
from engine.core.plan import PageCopy, Phase, Plan
from engine.core.request import LoadedAhead, Request

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
STORAGE_BACKENDS = ("file", "mooncake")
_USES_TO_WRITE = {"write_through": 1, "write_through_selective": 2}  # by requests that computed or read a node
TIERS = ("device", "host", "disk")
COUNTED = (
    *(f"{tier}_hit_tokens" for tier in TIERS),
    "skipped_pages",
    "saved_pages",
    "loaded_pages",
    "loaded_ahead_pages",
    "unwritten_pages",
    "written_pages",
    "read_pages",
    "bad_files",
    "failed_writes",
    "storage_pauses",
)


@dataclass(frozen=True, slots=True)
class TierRoom:
    """`states`: at multiples of `grid` tokens. `ahead`: early loads per step."""

    pages: int
    states: int = 0
    grid: int = 0
    ahead: int = 0


class HostCache(MemoryPart, TreePart, LowerTier):
    """Policies have their flags' names."""

    name = "host cache"

    def __init__(
        self,
        *,
        room: TierRoom,
        identity: KVIdentity,
        write_policy: str = "write_through",
        storage: StorageIndex | None = None,
        prefetch_policy: str = "best_effort",
        prefetch_timeout_s: float = 1.0,
    ) -> None:
        assert write_policy in WRITE_POLICIES and prefetch_policy in PREFETCH_POLICIES
        self.pages = HostPages(room.pages)
        self.states = HostPages(room.states, first=room.pages) if room.states else None
        self.counted = dict.fromkeys((f"hicache_{name}" for name in COUNTED), 0)
        self.keys = RequestKeys(identity, grid=room.grid if room.states else 0)
        self._writes_back = write_policy == "write_back"
        self._uses_to_write = _USES_TO_WRITE.get(write_policy)
        self._out: list[PageCopy] = []  # requested since the last plan
        self._in: list[PageCopy] = []
        self._found: list[int] = []  # by `open`, for `start`
        self._states_out: list[PageCopy] = []  # as `_out`, to host numbers
        self._states_in: list[int] = []  # host numbers
        self._state_found: int | None = None  # by `open`, for `take_state`
        self._under_way: dict[int, list[PageCopy]] = {}  # by uncollected plan number
        self._state_copies: dict[int, tuple[list[PageCopy], list[int]]] = {}  # states, likewise
        self.ahead_pages = self.pages_ahead_left = room.ahead
        self.storage: StorageTier | None = None
        if storage is not None:
            self.storage = StorageTier(
                storage,
                pages=self.pages,
                states=self.states,
                keys=self.keys,
                prefetch_policy=prefetch_policy,
                prefetch_timeout_s=prefetch_timeout_s,
                counters=self.counted,
            )

    def use_identity(self, identity: KVIdentity) -> None:
        """Name pages for other weights; call after `forget`."""
        assert self.pages.num_named == 0
        self.keys.identity = identity

    # ---- events of the tree

    def share(self, request: Request, inserted: Inserted, *, start: int, end: int) -> None:
        if inserted.existing < end:
            inserted.node.keys = self.keys.of(request, end)[inserted.existing :]
            self._write_when_used(inserted.node)

    def on_read(self, node: Node) -> None:
        """Note a reader of the path to `node`."""
        path = [*node.up()][::-1]
        for above in path:
            self._write_when_used(above)
        self._touch([key for above in path for key in above.keys])

    def on_split(self, upper: Node, lower: Node) -> None:
        cut = len(upper.pages)
        upper.keys, lower.keys = lower.keys[:cut], lower.keys[cut:]

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        """Copy its pages, which the next planned step may overwrite later."""
        if self._writes_back and evicted:
            self._copy_out(node)

    def check_node(self, node: Node) -> None:
        assert len(node.keys) == len(node.pages), "a page in the tree without its key below"

    def _write_when_used(self, node: Node) -> None:
        if self._uses_to_write is not None and node.uses >= self._uses_to_write:
            self._copy_out(node)

    def _copy_out(self, node: Node) -> None:
        """Copy missing pages, front first: chains need it."""
        for key, page in zip(node.keys, node.pages, strict=True):
            if not self._copy(self.pages, key, page, self._out):
                return
        if node.state and self.states is not None:
            self._copy(self.states, state_key(node.keys[-1]), node.state, self._states_out)

    def _copy(self, pages: HostPages, key: bytes, page: int, out: list[PageCopy]) -> bool:
        """False: no room."""
        if pages.get(key) is not None:
            return True
        host_page = pages.take()
        if host_page is None:
            self.counted["hicache_skipped_pages"] += 1
            return False
        if self.storage is not None:
            self.storage.on_reuse(host_page)
        pages.name(host_page, key)
        out.append(PageCopy(page=page, host_page=host_page))
        self.counted["hicache_saved_pages"] += 1
        return True

    def on_state(self, node: Node, *, evicted: bool) -> None:
        if evicted and self._writes_back:
            self._copy_out(node)
        elif not evicted:
            self._write_when_used(node)

    def _touch(self, chain: list[bytes]) -> None:
        self.pages.touch(reversed(chain))
        if self.states is not None:
            self.states.touch(chain)  # the last state serves most
        if self.storage is not None:
            self.storage.index.touch(reversed(chain))

    # ---- admission

    def prefetch(self, request: Request, memory: Memory) -> None:
        if self.storage is not None:
            start = len(memory.match_prefix(request).pages)
            end = self._end_of(request)
            self._touch(self.keys.chain(request, 0, end))  # or its own front would be evicted for its end
            self.storage.prefetch(request, self.keys.chain(request, start, end))

    def awaits(self, request: Request, now_s: float) -> bool:
        return self.storage is not None and self.storage.awaits(request, now_s)

    def _end_of(self, request: Request) -> int:
        return match_limit(request) // self.keys.identity.page_size

    def open(self, request: Request, match: Match, *, lands: bool) -> None:
        """Pin host pages after the match before any eviction for the request."""
        start, end = len(match.pages), self._end_of(request)
        if self.states is not None and not lands:
            end = start + self._find_state(request, self.states, start, end)
        self._found = self.find(request, start=start, end=end)
        self.on_read(match.node)

    def _find_state(self, request: Request, states: HostPages, start: int, end: int) -> int:
        """Pin the last state; return its pages."""
        chain = self.keys.chain(request, start, end)
        usable = self.keys.usable(chain, lambda key: (states if is_state(key) else self.pages).get(key) is not None)
        if not usable:
            return 0
        found = states.get(usable[-1])
        assert found is not None
        states.pin(found)
        self._states_in.append(found)
        if self.storage is not None:
            self.storage.take_read([found])
        self._state_found = found - states.first
        return len(usable) - 1

    def take_state(self) -> int | None:
        found, self._state_found = self._state_found, None
        return found

    def start(self, request: Request, match: Match, *, lands: bool) -> None:
        """Copy host pages before any read of the step."""
        found, self._found = self._found, []
        self.load(request, found, start=len(match.pages))
        request.launched_len += len(found) * self.keys.identity.page_size
        request.computed_len = request.launched_len

    def find(self, request: Request, *, start: int, end: int) -> list[int]:
        """Pin host pages from `start` to a gap, until the step of `load` is collected."""
        found = list[int]()
        for key in self.keys.of(request, end)[start:]:
            page = self.pages.get(key)
            if page is None:
                break
            self.pages.pin(page)
            found.append(page)
        return found

    def load(self, request: Request, host_pages: list[int], *, start: int) -> None:
        """Copy found pages to the request's from `start`; count tier hits at admission."""
        num_read = self._load(request, request.pages[start : start + len(host_pages)], host_pages, start=start)
        ahead, request.lower_tiers.ahead = request.lower_tiers.ahead, LoadedAhead()
        if not request.admitted:
            size = self.keys.identity.page_size
            num_ahead = max(0, min(start, ahead.end) - ahead.begin)  # of the `start` pages on the device
            num_read += min(ahead.num_read, num_ahead)
            split = (start - num_ahead, len(host_pages) + num_ahead - num_read, num_read)
            request.stats.cached_by_tier = [pages * size for pages in split]
            for tier, tokens in zip(TIERS, request.stats.cached_by_tier, strict=True):
                self.counted[f"hicache_{tier}_hit_tokens"] += tokens

    # ---- requests that wait

    @property
    def files_come(self) -> bool:
        return self.storage is not None and self.storage.busy

    def load_ahead(self, request: Request, memory: Memory, *, earlier: Sequence[Request], most: int) -> None:
        match = memory.match_prefix(request)
        start, end = len(match.pages), self._end_of(request)
        loads = request.keep_kv and request.lower_tiers.ahead.end <= start < end and self.holds(request, start)
        if most < 1 or not loads:
            return
        available, cache = memory.available, memory.cache
        kept = [match.node, *(memory.match_prefix(other).node for other in earlier)]
        for node in kept:
            cache.lock(node)
        below = self.find(request, start=start, end=min(end, start + min(most, memory.available)))
        if below:
            self._insert_ahead(request, memory, match.pages, below)
        for node in kept:
            cache.unlock(node)
        assert memory.available == available, "a load ahead takes nothing from admission and growth"

    def _insert_ahead(self, request: Request, memory: Memory, cached: list[int], host_pages: list[int]) -> None:
        pages, start, end = memory.take(len(host_pages)), len(cached), len(cached) + len(host_pages)
        num_read = self._load(request, pages, host_pages, start=start)
        self.pages_ahead_left -= len(pages)
        self.counted["hicache_loaded_ahead_pages"] += len(pages)
        ahead = request.lower_tiers.ahead
        begin = ahead.begin if ahead.end == start else start
        request.lower_tiers.ahead = LoadedAhead(begin, end, ahead.num_read + num_read)
        tokens = request.key_tokens(0, end * memory.allocator.page_size)
        inserted = memory.cache.insert(tokens, cached + pages, branch=request.branch, priority=memory.rank(request))
        self.share(request, inserted, start=start, end=end)

    def holds(self, request: Request, index: int) -> bool:
        return self.pages.get(self.keys.of(request, index + 1)[index]) is not None

    def _load(self, request: Request, pages: list[int], host_pages: list[int], *, start: int) -> int:
        """Return how many pages came from files, unused since."""
        self._in += [PageCopy(page, host_page) for page, host_page in zip(pages, host_pages, strict=True)]
        self._touch(self.keys.chain(request, 0, start + len(host_pages)))
        self.counted["hicache_loaded_pages"] += len(host_pages)
        return 0 if self.storage is None else self.storage.take_read(host_pages)

    # ---- steps

    def asks_for_a_step(self, phase: Phase | None) -> bool:
        return bool(self._out or self._in or self._states_out)

    def attach(self, plan: Plan) -> None:
        plan.to_host, self._out = self._out, []
        plan.from_host, self._in = self._in, []
        if plan.to_host or plan.from_host:
            self._under_way[plan.seq] = [*plan.to_host, *plan.from_host]
        if self.states is not None and (self._states_out or self._states_in):
            self._state_copies[plan.seq] = self._states_out, self._states_in
            first = self.states.first
            plan.states_to_host = [PageCopy(copy.page, copy.host_page - first) for copy in self._states_out]
            self._states_out, self._states_in = [], []
        self.pages_ahead_left = self.ahead_pages

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        self._under_way.pop(plan.seq, None)
        for copy in reversed(plan.from_host):
            self.pages.unpin(copy.host_page)
        self._end_saves(self.pages, plan.to_host)
        if self.states is not None and plan.seq in self._state_copies:
            saved, loaded = self._state_copies.pop(plan.seq)
            for number in loaded:
                self.states.unpin(number)
            self._end_saves(self.states, saved)

    def _end_saves(self, pages: HostPages, copies: Sequence[PageCopy]) -> None:
        for host_page in [] if self.storage is None else self.storage.write(copy.host_page for copy in copies):
            pages.pin(host_page)
        for copy in reversed(copies):
            pages.unpin(copy.host_page)

    def is_settled(self, pages: Sequence[int], *, state: int = 0) -> bool:
        copies = chain(self._out, self._in, *self._under_way.values())
        states = chain(self._states_out, *(saved for saved, _ in self._state_copies.values()))
        settled = not state or all(copy.page != state for copy in states)
        return settled and {copy.page for copy in copies}.isdisjoint(pages)

    # ---- all of it

    def forget(self, *, files: bool) -> None:
        for copy in [*self._out, *self._in]:
            self.pages.unpin(copy.host_page)
        self._out, self._in = [], []
        self.pages.forget_all()
        if self.states is not None:
            for number in [*(copy.host_page for copy in self._states_out), *self._states_in]:
                self.states.unpin(number)
            self._states_out, self._states_in = [], []
            self.states.forget_all()
        if self.storage is not None:
            self.storage.forget(files=files)

    def counters(self) -> dict[str, float]:
        return {name: float(count) for name, count in self.counted.items()}

    def gauges(self) -> dict[str, float]:
        size = self.keys.identity.page_size
        host = {
            "hicache_host_used_tokens": float(self.pages.num_named * size),
            "hicache_host_total_tokens": float(self.pages.num_pages * size),
        }
        return host if self.storage is None else host | self.storage.gauges()

    def check(self, requests: Sequence[Request]) -> None:
        self.pages.check()
        copied = {copy.host_page for copy in [*self._out, *self._in]}
        assert all(self.pages.is_pinned(page) for page in copied), "a host page that is being copied is not pinned"
        if self.states is not None:
            self.states.check()
            assert self._state_found is None, "a state is found and no request takes it"
        if self.storage is not None:
            self.storage.check()
