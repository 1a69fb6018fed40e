"""KV memory of requests: admission, extension, sharing, release.

Only this changes a request's `pages`, `shared_pages`, `dup_pages` and `lock` (request.py). Other
memory belongs to `parts` (memory_part.py); requests get all they need, or nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.mem_cache.memory_part import MemoryPart, P, part_of
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import Match, RadixCache
from engine.core.outputs import unseen_from
from engine.core.plan import Phase, Plan
from engine.core.request import Request
from engine.messages import FinishReason


@dataclass(slots=True, frozen=True)
class Detached:
    """Quarantined memory: pages, and that of parts by allocator."""

    pages: list[int] = field(default_factory=list)
    beside: list[tuple[PageAllocator, list[int]]] = field(default_factory=list)


class Memory:
    """Pages plus `parts`, in the order of memory_part.py. `rank`: priority, higher first."""

    def __init__(
        self,
        allocator: PageAllocator,
        cache: RadixCache,
        parts: Sequence[MemoryPart] = (),
        *,
        rank: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self.allocator = allocator
        self.cache = cache
        self.parts = tuple(parts)
        self.rank = rank

    def part(self, kind: type[P]) -> P | None:
        return part_of(kind, self.parts)

    def having(self, kind: type[P]) -> tuple[P, ...]:
        """Parts of `kind`, which planning asks: none or one."""
        return tuple(part for part in self.parts if isinstance(part, kind))

    def of(self, kind: type[P]) -> P:
        return self.part(kind) or kind()

    @property
    def allocators(self) -> tuple[PageAllocator, ...]:
        return (self.allocator, *(allocator for part in self.parts for allocator in part.allocators))

    @property
    def available(self) -> int:
        """Pages available at once: free, or cached without readers."""
        return self.allocator.num_free + self.cache.num_evictable

    # ---- admission

    def refusal(self, request: Request, *, part_tokens: int) -> FinishReason | None:
        reasons = (part.refusal(request, part_tokens=part_tokens) for part in self.parts)
        return next(filter(None, reasons), None)

    def admit(self, request: Request, *, reserved_pages: int, lands: bool = False) -> bool:
        """Lock the cached prefix and allocate the other known tokens; False: no room.

        `reserved_pages` stay free for later extension. With `lands`, uncached KV arrives from
        elsewhere or the host.
        """
        if not all(part.fits(request) for part in self.parts):
            return False
        match = self.match_prefix(request)
        self.cache.lock(match.node)
        need = self.allocator.pages_for(request.num_tokens) - len(match.pages)
        fits = need + reserved_pages <= self.available
        if fits:
            self.cache.use(match.node, priority=self.rank(request))
        self.cache.unlock(match.node)
        if not fits:
            return False
        for part in self.parts:  # eviction for it may hit its own path
            part.open(request, match, lands=lands)
        self.cache.lock(match.node)
        request.lock = match.node
        request.pages = match.pages + self.take(need)
        request.shared_pages = len(match.pages)
        request.launched_len = request.computed_len = len(match.pages) * self.allocator.page_size
        for part in self.parts:
            part.start(request, match, lands=lands)
        self.share(request)  # copies of parts run before any read
        return True

    def pages_left(self, request: Request, *, without: Sequence[Request]) -> int:
        """Pages left after the known tokens of `request` without `without`; negative: no room."""
        if not all(part.fits(request, without=without) for part in self.parts):
            return -1
        match = self.match_prefix(request)
        self.cache.lock(match.node)
        locks = [r.lock for r in without if r.lock is not None]
        for lock in locks:
            self.cache.unlock(lock)
        available = self.available + sum(len(r.own_pages()) for r in without)
        for node in locks:
            self.cache.lock(node)
        self.cache.unlock(match.node)
        return available + len(match.pages) - self.allocator.pages_for(request.num_tokens)

    def match_prefix(self, request: Request) -> Match:
        return self.cache.match_usable(request.key_tokens(0, match_limit(request)), branch=request.branch)

    def forget_prefixes(self, *, files: bool) -> None:
        """Forget all prefixes (`files`: on disk, too) and parts' content; nothing is in flight."""
        self.cache.flush()
        for part in self.parts:
            part.forget(files=files)

    # ---- growth

    def needs_page(self, request: Request) -> bool:
        return request.launched_len == len(request.pages) * self.allocator.page_size

    def grow(self, request: Request) -> bool:
        if self.available < 1:
            return False
        request.pages += self.take(1)
        return True

    def make_room(self, request: Request, count: int, *, left_free: int) -> int:
        """Take free pages for `count` drafts after the next token; return how many fit.

        Nothing is evicted, and `left_free` pages are kept for others.
        """
        size = self.allocator.page_size
        while (room := len(request.pages) * size - request.launched_len - 1) < count:
            if self.allocator.num_free <= left_free:
                return room
            request.pages += self.allocator.allocate(1)
        return count

    def extend(self, request: Request, end: int, *, answer: bool) -> None:
        """Allocate in parts for tokens before `end` of this step; there is room."""
        for part in self.parts:
            part.extend(request, end, answer=answer)

    def retire(self, request: Request) -> None:
        for part in self.parts:
            part.retire(request)

    def share(self, request: Request) -> None:
        """Insert computed full pages into the cache; the request keeps its own row."""
        start, end = request.shared_pages, min(request.computed_len, request.num_tokens) // self.allocator.page_size
        if end <= start or not self.cache.enabled or not request.keep_kv:
            return
        tokens, rank = request.key_tokens(0, end * self.allocator.page_size), self.rank(request)
        inserted = self.cache.insert(tokens, request.pages[:end], branch=request.branch, priority=rank)
        for part in self.parts:
            part.share(request, inserted, start=start, end=end)
        request.dup_pages += request.pages[start : inserted.existing]
        request.shared_pages = end
        self.cache.lock(inserted.node)
        self._unlock(request)
        request.lock = inserted.node

    def take(self, n: int) -> list[int]:
        """Take `n` pages, free or evicted, within `available`."""
        short = n - self.allocator.num_free
        if short > 0:
            self.cache.evict(short)
        return self.allocator.allocate(n)

    # ---- ends

    def give_back(self, request: Request) -> None:
        """Release all memory; computed pages stay cached. No step is in flight."""
        assert request.inflight == 0, f"{request.rid}: pages given back while a step may write them"
        self.share(request)
        self._unlock(request)
        self.allocator.free(request.own_pages())
        for part in self.parts:
            part.free(request)
        _forget(request)

    def lend(self, request: Request) -> int:
        """Lock cached pages for a request that computes nothing; return their number."""
        match = self.cache.match_usable(request.key_tokens(0, request.num_tokens), branch=request.branch)
        if not all(part.lend(request, match) for part in reversed(self.parts)):
            match = Match([], self.cache.root)
        self.cache.lock(match.node)
        request.lock, request.pages, request.shared_pages = match.node, list(match.pages), len(match.pages)
        request.launched_len = request.computed_len = len(match.pages) * self.allocator.page_size
        return len(match.pages)

    def keep_landed(self, request: Request) -> None:
        """Cache a peer's prefix."""
        for part in self.parts:
            part.arrange_landed(request)
        self.share(request)
        for part in self.parts:
            part.keep_landed(request)

    def quarantine(self, request: Request) -> Detached:
        """Detach own memory that a peer may still write; unlock the prefix."""
        assert request.inflight == 0 and not request.dup_pages, f"{request.rid}: only untouched pages"
        pages = request.own_pages()
        self._unlock(request)
        self.allocator.quarantine(pages)
        detached = Detached(pages, [piece for part in self.parts for piece in part.detach(request)])
        _forget(request)
        return detached

    def end_quarantine(self, detached: Detached) -> None:
        """Free memory that no peer can write any longer."""
        self.allocator.end_quarantine(detached.pages)
        for allocator, numbers in detached.beside:
            allocator.end_quarantine(numbers)

    def tail(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        return tuple(piece for part in self.parts for piece in part.tail(request, num_tokens))

    def landed_extra(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        return tuple(piece for part in self.parts for piece in part.landed_extra(request, num_tokens))

    def _unlock(self, request: Request) -> None:
        if request.lock is not None:
            self.cache.unlock(request.lock)

    # ---- plans

    def asks_for_a_step(self, phase: Phase | None) -> bool:
        return any(part.asks_for_a_step(phase) for part in self.parts)

    def attach(self, plan: Plan) -> None:
        for part in self.parts:
            part.attach(plan)

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        for part in self.parts:
            part.on_collected(plan, failed=failed)

    # ---- reports

    def counters(self) -> dict[str, float]:
        return {name: count for part in self.parts for name, count in part.counters().items()}

    def gauges(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.gauges().items()}

    def checks(self, requests: Callable[[], Sequence[Request]]) -> dict[str, Callable[[], None]]:
        parts = {part.name: _check_of(part, requests) for part in self.parts}
        return {"page allocator": self.allocator.check, "radix cache": self.cache.check, **parts}


def _check_of(part: MemoryPart, requests: Callable[[], Sequence[Request]]) -> Callable[[], None]:
    return lambda: part.check(requests())


def _forget(request: Request) -> None:
    request.lock, request.pages, request.dup_pages, request.shared_pages = None, [], [], 0
    request.launched_len = request.computed_len = 0
    request.recurrent.snapshots_at, request.recurrent.answer, request.recurrent.pinned = (), None, 0


def growth_pages(allocator: PageAllocator, request: Request, num_tokens: int) -> int:
    known = request.num_tokens
    return allocator.pages_for(known + num_tokens) - allocator.pages_for(known)


def match_limit(request: Request) -> int:
    """Limit the cached tokens of a request.

    At least one token is computed; prompt logprobs need logits from one before their start, hidden
    states need all.
    """
    limit = min(request.num_tokens - 1, unseen_from(request))
    if request.wants_input_logprobs:
        assert request.logprobs is not None
        limit = min(limit, max(0, request.logprobs.start_len - 1))
    return limit
