"""The KV memory of requests: admission, growth, sharing, giving back.

The only place where a request's `pages`, `shared_pages`, `dup_pages` and `lock` change (drawn in request.py). What a request has
besides pages is of the `parts` (memory_part.py): it gets all that it needs, or nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.hidden import unseen_from
from engine.core.lanes import Lane
from engine.core.memory_part import MemoryPart, P, part_of
from engine.core.page_allocator import PageAllocator
from engine.core.plan import Plan
from engine.core.radix_cache import Match, RadixCache
from engine.core.request import Request
from engine.messages import FinishReason


@dataclass(slots=True, frozen=True)
class Detached:
    """Memory in quarantine: pages, and what the parts detached, each with its allocator."""

    pages: list[int] = field(default_factory=list)
    beside: list[tuple[PageAllocator, list[int]]] = field(default_factory=list)


class Memory:
    """`parts`: what requests have beside pages, in the order of memory_part.py. `rank`: the priority of a request, higher is more."""

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
        """Return the part of this kind, if there is one."""
        return part_of(kind, self.parts)

    def of(self, kind: type[P]) -> P:
        """Return the part that decides what `kind` describes, or else plain `kind`."""
        return self.part(kind) or kind()

    @property
    def allocators(self) -> tuple[PageAllocator, ...]:
        """Return the allocator of pages, and those of the parts."""
        return (self.allocator, *(allocator for part in self.parts for allocator in part.allocators))

    @property
    def available(self) -> int:
        """Count the pages that can be taken now: free ones, and cached ones without readers."""
        return self.allocator.num_free + self.cache.num_evictable

    # ---- admission

    def refusal(self, request: Request, *, part_tokens: int) -> FinishReason | None:
        """Return why a part can never have room for `request`, or None."""
        reasons = (part.refusal(request, part_tokens=part_tokens) for part in self.parts)
        return next(filter(None, reasons), None)

    def admit(self, request: Request, *, reserved_pages: int, lands: bool = False) -> bool:
        """Lock the cached prefix and take pages for the rest of the known tokens; False: they do not fit.

        `reserved_pages`: left free, for the growth of this request and of others. `lands`: what is not cached comes from elsewhere, or back
        from the host.
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
        for part in self.parts:  # what makes room for it may lie on its own path
            part.open(request, match, lands=lands)
        self.cache.lock(match.node)
        request.lock = match.node
        request.pages = match.pages + self.take(need)
        request.shared_pages = len(match.pages)
        request.launched_len = request.computed_len = len(match.pages) * self.allocator.page_size
        for part in self.parts:
            part.start(request, match, lands=lands)
        self.share(request)  # what a part copies in this step before any read
        return True

    def pages_left(self, request: Request, *, without: Sequence[Request]) -> int:
        """Count the pages left beside the known tokens of `request` if `without` gave theirs back; negative: no room."""
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
        """Find the cached prefix that `request` may use, and mark it as used."""
        return self.cache.match_usable(request.key_tokens(0, match_limit(request)), branch=request.branch)

    def forget_prefixes(self, *, files: bool) -> None:
        """Forget all prefixes (`files`: on disk, too) and what parts keep. Nothing may be locked, and no step in flight."""
        self.cache.flush()
        for part in self.parts:
            part.forget(files=files)

    # ---- growth

    def needs_page(self, request: Request) -> bool:
        """Whether the next token starts a page that the request does not have."""
        return request.launched_len == len(request.pages) * self.allocator.page_size

    def grow(self, request: Request) -> bool:
        if self.available < 1:
            return False
        request.pages += self.take(1)
        return True

    def make_room(self, request: Request, count: int, *, left_free: int) -> int:
        """Take free pages for `count` tokens behind the next one, and return for how many there is room. Nothing is evicted for guesses.

        `left_free`: pages that others may need.
        """
        size = self.allocator.page_size
        while (room := len(request.pages) * size - request.launched_len - 1) < count:
            if self.allocator.num_free <= left_free:
                return room
            request.pages += self.allocator.allocate(1)
        return count

    def extend(self, request: Request, end: int, *, answer: bool) -> None:
        """Take what else the tokens before `end` need in a step that is about to compute them; there is room."""
        for part in self.parts:
            part.extend(request, end, answer=answer)

    def retire(self, request: Request) -> None:
        """Give back what nothing reads behind the tokens that have been computed."""
        for part in self.parts:
            part.retire(request)

    def share(self, request: Request) -> None:
        """Put the computed whole pages into the cache; the request keeps reading its own row."""
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
        if request.lock is not None:
            self.cache.unlock(request.lock)
        request.lock = inserted.node

    def take(self, n: int) -> list[int]:
        """Take `n` pages, free or evicted; there are as many (`available`)."""
        short = n - self.allocator.num_free
        if short > 0:
            self.cache.evict(short)
        return self.allocator.allocate(n)

    # ---- ends

    def give_back(self, request: Request) -> None:
        """Take everything from the request; what is computed stays cached. No step may be in flight."""
        assert request.inflight == 0, f"{request.rid}: pages given back while a step may write them"
        self.share(request)
        if request.lock is not None:
            self.cache.unlock(request.lock)
        self.allocator.free(request.own_pages())
        for part in self.parts:
            part.free(request)
        _forget(request)

    def lend(self, request: Request) -> int:
        """Lock what is cached of the tokens of a request that computes nothing; return how many pages it has of them now."""
        match = self.cache.match(request.key_tokens(0, request.num_tokens), branch=request.branch)
        self.cache.lock(match.node)
        request.lock, request.pages, request.shared_pages = match.node, list(match.pages), len(match.pages)
        request.launched_len = request.computed_len = len(match.pages) * self.allocator.page_size
        return len(match.pages)

    def quarantine(self, request: Request) -> Detached:
        """Detach the own memory, which a transfer peer may still write, and unlock the prefix, which it never had."""
        assert request.inflight == 0 and not request.dup_pages, f"{request.rid}: only untouched pages"
        pages = request.own_pages()
        if request.lock is not None:
            self.cache.unlock(request.lock)
        self.allocator.quarantine(pages)
        detached = Detached(pages, [piece for part in self.parts for piece in part.detach(request)])
        _forget(request)
        return detached

    def end_quarantine(self, detached: Detached) -> None:
        """Free memory that no peer can write any more."""
        self.allocator.end_quarantine(detached.pages)
        for allocator, numbers in detached.beside:
            allocator.end_quarantine(numbers)

    def tail(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        """Return what a hand-over of the first `num_tokens` tokens brings along beside pages."""
        return tuple(piece for part in self.parts for piece in part.tail(request, num_tokens))

    # ---- plans

    def asks_for_a_step(self, lane: Lane | None) -> bool:
        """Whether a part needs a step of `lane` even if no request has tokens for it."""
        return any(part.asks_for_a_step(lane) for part in self.parts)

    def attach(self, plan: Plan) -> None:
        """Put what the parts requested since the last plan into this one."""
        for part in self.parts:
            part.attach(plan)

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        """Have the parts take note of a collected step. `failed`: the device had no memory for it."""
        for part in self.parts:
            part.on_collected(plan, failed=failed)

    # ---- reports

    def counters(self) -> dict[str, float]:
        return {name: count for part in self.parts for name, count in part.counters().items()}

    def gauges(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.gauges().items()}

    def checks(self, requests: Callable[[], Sequence[Request]]) -> dict[str, Callable[[], None]]:
        """Return the checks by the name of the owner. `requests`: returns all that are live."""
        parts = {part.name: _check_of(part, requests) for part in self.parts}
        return {"page allocator": self.allocator.check, "radix cache": self.cache.check, **parts}


def _check_of(part: MemoryPart, requests: Callable[[], Sequence[Request]]) -> Callable[[], None]:
    return lambda: part.check(requests())


def _forget(request: Request) -> None:
    request.lock, request.pages, request.dup_pages, request.shared_pages = None, [], [], 0
    request.launched_len = request.computed_len = 0
    request.snapshots_at, request.answer_snapshot = (), None


def growth_pages(allocator: PageAllocator, request: Request, num_tokens: int) -> int:
    """Return the pages that `num_tokens` more tokens will take."""
    known = request.num_tokens
    return allocator.pages_for(known + num_tokens) - allocator.pages_for(known)


def match_limit(request: Request) -> int:
    """Return how many tokens may come from the cache.

    At least one is computed; prompt logprobs need the logits from one before their start, hidden states all.
    """
    limit = min(request.num_tokens - 1, unseen_from(request))
    if request.wants_input_logprobs:
        assert request.logprobs is not None
        limit = min(limit, max(0, request.logprobs.start_len - 1))
    return limit
