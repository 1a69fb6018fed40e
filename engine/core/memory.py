"""The KV memory of requests: admission, growth, sharing, giving back.

The only place where a request's `pages`, `shared_pages`, `dup_pages` and `lock` change (drawn in request.py). What a request remembers
besides pages is of `states` (state_slots.py): it gets all that it needs, or nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.hidden import unseen_from
from engine.core.host_cache import HostCache
from engine.core.image_cache import ImageCache
from engine.core.page_allocator import PageAllocator
from engine.core.radix_cache import Match, RadixCache
from engine.core.request import Request
from engine.core.state_slots import StateSlots
from engine.core.window_pages import WindowPages


@dataclass(slots=True, frozen=True)
class Detached:
    """Memory in quarantine."""

    pages: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)


class Memory:
    """`host`: the tier below `cache`, or None. `states`: of a model with recurrent layers. `windows`: of layers with a window.
    `images`: whose features are on the device, of a model that sees them. `rank`: the priority of a request, higher is more.
    """

    def __init__(
        self,
        *,
        allocator: PageAllocator,
        cache: RadixCache,
        host: HostCache | None = None,
        states: StateSlots | None = None,
        windows: WindowPages | None = None,
        images: ImageCache | None = None,
        rank: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self.allocator = allocator
        self.cache = cache
        self.host = host
        self.states = states
        self.windows = windows
        self.images = images
        self._rank = rank

    @property
    def available(self) -> int:
        """Count the pages that can be taken now: free ones, and cached ones without readers."""
        return self.allocator.num_free + self.cache.num_evictable

    def admit(self, request: Request, *, reserved_pages: int, lands: bool = False) -> bool:
        """Lock the cached prefix and take pages for the rest of the known tokens; False: they do not fit.

        `reserved_pages`: left free, for the growth of this request and of others. `lands`: what is not cached comes from elsewhere, or back
        from the host.
        """
        if self.states is not None and not self.states.num_available:
            return False
        if self.windows is not None and not self.windows.fits(request):
            return False
        match = self.match_prefix(request)
        self.cache.lock(match.node)
        need = self.allocator.pages_for(request.num_tokens) - len(match.pages)
        if need + reserved_pages > self.available:
            self.cache.unlock(match.node)
            return False
        self.cache.use(match.node, priority=self._rank(request))
        below: list[int] = []  # host pages that continue the match, pinned before anything is evicted for the request
        if self.host is not None:
            end = match_limit(request) // self.allocator.page_size
            below = self.host.find(request, start=len(match.pages), end=end)
            self.host.on_read(match.node)
        request.lock = match.node
        if self.states is not None:
            self.cache.unlock(match.node)  # the last snapshot that may go can lie on its own path
            self._open_state(self.states, request, match, lands=lands)
            self.cache.lock(match.node)
        if self.windows is not None:
            if lands:
                self.windows.adopt(request)
            else:
                self.windows.open(request, match.window)
        request.pages = match.pages + self._take(need)
        request.shared_pages = len(match.pages)
        request.launched_len = request.computed_len = len(match.pages) * self.allocator.page_size
        if self.host is not None:
            self.host.load(request, below, start=request.shared_pages)
        if below:  # copied in this step before any read, and shared at once
            request.launched_len += len(below) * self.allocator.page_size
            request.computed_len = request.launched_len
            self.share(request)
        return True

    def _open_state(self, states: StateSlots, request: Request, match: Match, *, lands: bool) -> None:
        if lands:
            states.adopt(request)
            return
        states.open(request, source=match.state)
        size = self.allocator.page_size
        if states.keeps_snapshots and self.cache.enabled and request.keep_kv:
            states.aim(request, start=len(match.pages) * size, cached=(match.num_cached or 0) * size)

    def pages_left(self, request: Request, *, without: Sequence[Request]) -> int:
        """Count the pages left beside the known tokens of `request` if `without` gave theirs back; negative: no room."""
        if self.states is not None and not (self.states.num_available or any(r.state for r in without)):
            return -1
        if self.windows is not None and not self.windows.fits(request, without=without):
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

    def prefetch(self, request: Request) -> None:
        """Start to read into the host what lies on disk alone of its prefix."""
        if self.host is not None and self.host.disk is not None:
            end = match_limit(request) // self.allocator.page_size
            self.host.prefetch(request, start=len(self.match_prefix(request).pages), end=end)

    def load_ahead(self, request: Request, *, earlier: Sequence[Request], most: int) -> None:
        """Load up to `most` pages that continue the cached prefix of a waiting request, as evictable pages of the tree.

        Whatever is evicted for them, it is nothing that `earlier` requests would find. What was loaded ahead before and is
        gone already stays so.
        """
        assert self.host is not None
        match = self.match_prefix(request)
        start, end = len(match.pages), match_limit(request) // self.allocator.page_size
        loads = request.keep_kv and request.lower_tiers.ahead.end <= start < end and self.host.holds(request, start)
        if most < 1 or not loads:
            return
        available = self.available
        kept = [match.node, *(self.match_prefix(other).node for other in earlier)]
        for node in kept:
            self.cache.lock(node)
        below = self.host.find(request, start=start, end=min(end, start + min(most, self.available)))
        if below:
            self._insert_ahead(request, match.pages, below)
        for node in kept:
            self.cache.unlock(node)
        assert self.available == available, "a load ahead takes nothing from admission and growth"

    def _insert_ahead(self, request: Request, cached: list[int], host_pages: list[int]) -> None:
        assert self.host is not None
        pages, num_pages = self._take(len(host_pages)), len(cached) + len(host_pages)
        self.host.load_ahead(request, pages, host_pages, start=len(cached))
        tokens, keys = (
            request.key_tokens(0, num_pages * self.allocator.page_size),
            self.host.keys.of(request, num_pages),
        )
        self.cache.insert(tokens, cached + pages, keys, branch=request.branch, priority=self._rank(request))

    def awaits(self, request: Request, now_s: float) -> bool:
        """Whether `request` waits for its prefix to be read from disk."""
        disk = self.host.disk if self.host is not None else None
        return disk is not None and disk.awaits(request, now_s)

    def forget_prefixes(self, *, files: bool) -> None:
        """Forget all prefixes (`files`: on disk, too) and all features of images. Nothing may be locked, and no step in flight."""
        self.cache.flush()
        if self.host is not None:
            self.host.forget(files=files)
        if self.images is not None:
            self.images.forget_all()

    def match_prefix(self, request: Request) -> Match:
        """Find the cached prefix that `request` may use, and mark it as used."""
        find = self.cache.match
        if self.states is not None:
            find = self.cache.match_state
        elif self.windows is not None:
            find = self.cache.match_window
        return find(request.key_tokens(0, match_limit(request)), branch=request.branch)

    def needs_page(self, request: Request) -> bool:
        """Whether the next token starts a page that the request does not have."""
        return request.launched_len == len(request.pages) * self.allocator.page_size

    def grow(self, request: Request) -> bool:
        if self.available < 1:
            return False
        request.pages += self._take(1)
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

    def share(self, request: Request) -> None:
        """Put the computed whole pages into the cache; the request keeps reading its own row."""
        whole = min(request.computed_len, request.num_tokens) // self.allocator.page_size
        if whole <= request.shared_pages or not self.cache.enabled or not request.keep_kv:
            return
        tokens = request.key_tokens(0, whole * self.allocator.page_size)
        keys = self.host.keys.of(request, whole) if self.host is not None else ()
        inserted = self.cache.insert(
            tokens, request.pages[:whole], keys, branch=request.branch, priority=self._rank(request)
        )
        if self.windows is not None:
            self.windows.share(request, inserted.node, start=request.shared_pages, end=whole)
        request.dup_pages += request.pages[request.shared_pages : inserted.existing]
        request.shared_pages = whole
        self.cache.lock(inserted.node)
        if request.lock is not None:
            self.cache.unlock(request.lock)
        request.lock = inserted.node

    def extend(self, request: Request, end: int) -> None:
        """Take what else the tokens before `end` need in a step that is about to compute them; there is room."""
        if self.windows is not None:
            self.windows.extend(request, end)

    def retire(self, request: Request) -> None:
        """Give back what nothing reads behind the tokens that have been computed."""
        if self.windows is not None:
            self.windows.retire(request)

    def end_of_step(self, request: Request, start: int, end: int) -> int:
        """Return how far a step may compute that is to compute tokens `start`..`end` of a prompt."""
        return end if self.states is None else self.states.cut(request, start, end)

    def snapshot(self, request: Request, at: int) -> None:
        """Keep the state that the planned step leaves after `at` tokens, if later requests may begin from it."""
        if self.states is not None:
            self.states.snapshot(request, at)

    @property
    def most_drafted(self) -> int | None:
        """Return how many requests of a step may verify drafts; None: any number."""
        return None if self.states is None else self.states.num_shadows

    def end_of_drafts(self, request: Request, start: int, end: int) -> int:
        """Return how far a step may verify drafts that is to compute tokens `start`..`end` of an answer."""
        return end if self.states is None or not self.cache.enabled else self.states.cut_answer(request, start, end)

    def snapshot_answer(self, request: Request, at: int) -> None:
        """The same of a step that computes tokens of an answer, `at` at most."""
        if self.states is not None and self.cache.enabled:
            self.states.snapshot_answer(request, at)

    def keep_snapshot(self, request: Request, at: int) -> None:
        """Give the snapshot after `at` tokens, if one was taken, to the tree, where `request` is shared so far."""
        if self.states is None or (slot := request.snapshots.pop(at, 0)) == 0:
            return
        above = request.answer_snapshot if at > len(request.input_ids) else None
        self.share(request)
        shared = request.shared_pages * self.allocator.page_size == at == request.computed_len
        if shared and request.keep_kv and request.finish is None and request.lock is not None:
            self.states.keep(slot, request.lock, above=above)
            request.answer_snapshot = request.lock if at > len(request.input_ids) else None
        else:
            self.states.drop(slot)

    def reject(self, request: Request, at: int) -> None:
        """Take back what a step has made of a state that passed a rejected draft, and forget the snapshot after `at` tokens."""
        if self.states is None:
            return
        if slot := request.snapshots.pop(at, 0):
            self.states.drop(slot)
        if request.finish is None:
            self.states.rewind(request)

    def give_back(self, request: Request) -> None:
        """Take everything from the request; what is computed stays cached. No step may be in flight."""
        assert request.inflight == 0, f"{request.rid}: pages given back while a step may write them"
        self.share(request)
        if self.windows is not None:
            self.windows.free(request)
        if request.lock is not None:
            self.cache.unlock(request.lock)
        self.allocator.free(request.own_pages())
        if self.states is not None:
            self.states.free(request)
        if self.images is not None:
            self.images.leave(request)
        _forget(request)

    def lend(self, request: Request) -> int:
        """Lock what is cached of the tokens of a request that computes nothing; return how many pages it has of them now."""
        match = self.cache.match(request.key_tokens(0, request.num_tokens), branch=request.branch)
        self.cache.lock(match.node)
        request.lock, request.pages, request.shared_pages = match.node, list(match.pages), len(match.pages)
        request.launched_len = request.computed_len = len(match.pages) * self.allocator.page_size
        return len(match.pages)

    def is_settled(self, pages: Sequence[int]) -> bool:
        """Whether no step that was planned still copies one of `pages` to the host, or from there."""
        return self.host is None or self.host.is_settled(pages)

    def quarantine(self, request: Request) -> Detached:
        """Detach the own memory, which a transfer peer may still write, and unlock the prefix, which it never had."""
        assert request.inflight == 0 and not request.dup_pages, f"{request.rid}: only untouched pages"
        pages = request.own_pages()
        if request.lock is not None:
            self.cache.unlock(request.lock)
        self.allocator.quarantine(pages)
        states = [] if self.states is None else self.states.quarantine(request)
        windows = [] if self.windows is None or not request.pages else self.windows.quarantine(request)
        _forget(request)
        return Detached(pages, states, windows)

    def end_quarantine(self, detached: Detached) -> None:
        """Free memory that no peer can write any more."""
        self.allocator.end_quarantine(detached.pages)
        if self.states is not None:
            self.states.allocator.end_quarantine(detached.states)
        if self.windows is not None:
            self.windows.allocator.end_quarantine(detached.windows)

    def tail(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        """Return what a hand-over of the first `num_tokens` tokens brings along beside pages: a state, and a window's pages."""
        states = () if self.states is None else ([request.state],)
        return states if self.windows is None else (*states, self.windows.tail(request, num_tokens))

    def _take(self, n: int) -> list[int]:
        short = n - self.allocator.num_free
        if short > 0:
            self.cache.evict(short)
        return self.allocator.allocate(n)

    def checks(self) -> dict[str, Callable[[], None]]:
        host = {} if self.host is None else {"host cache": self.host.check}
        states = {} if self.states is None else {"state slots": self.states.check}
        images = {} if self.images is None else {"image cache": self.images.check}
        return {"page allocator": self.allocator.check, "radix cache": self.cache.check, **host, **states, **images}


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
