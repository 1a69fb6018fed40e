"""Pages of sliding window layers: a separate pool that frees pages no later step reads.

`window` parallels a request's `pages`, with 0 for freed or future pages.

  FREE --extend--> HELD by one request --share--> CACHED: in the prefix tree, any number of readers
      |                              |  without readers: idle, evicted least recently used first
      +--retire, free--> FREE <------+

Queries at p read keys from p - W + 1. Pages retire by *collected* tokens, as steps in flight still
read. Prefixes are usable where the last window is present. Evicting a full page evicts its window
page, not the reverse. Admission bounds simultaneous pages, so extension never fails.

After SGLang's SWARadixCache; reader counts as in vLLM.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice, takewhile

from engine.core.mem_cache.memory_part import MemoryPart, Windows
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import Branch, Inserted, Match, Node, RadixCache, TreePart
from engine.core.outputs import refusal
from engine.core.request import Request
from engine.messages import FinishReason


class WindowPages(MemoryPart, TreePart, Windows):
    """`window`: tokens per query, including its own. `steps`: maximum in flight.

    `step_tokens`: prompt tokens per step, None for whole prompts. `rows`: answer tokens per step.
    """

    name = "window pages"

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        window: int,
        steps: int = 1,
        step_tokens: int | None = None,
        rows: int = 1,
    ) -> None:
        self.allocator = PageAllocator(num_pages=num_pages, page_size=page_size)
        self.allocators = (self.allocator,)
        self.window = window
        self.num_retired = 0  # pages since start
        self.on_change: Callable[[Node], None] = lambda node: None  # a node's window page came or went
        self._steps = steps
        self._step_tokens = step_tokens
        self._answer_tokens = max(steps, rows)  # in flight: verify steps run without overlap
        self._bounds: dict[Request, tuple[int, int]] = {}
        self._readers: dict[int, int] = {}  # of cached pages
        self._homes: dict[int, Node] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages without readers, least recently used first

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + len(self._idle)

    def first_page(self, num_tokens: int) -> int:
        """First page that a query after `num_tokens` reads."""
        return max(0, num_tokens - self.window + 1) // self.allocator.page_size

    # ---- admission

    def refusal(self, request: Request, *, part_tokens: int) -> FinishReason | None:
        if self._most([self._bound(request)]) <= self.allocator.num_pages:
            return None
        return refusal(
            f"input_ids: prompt ({len(request.input_ids)} tokens) plus max_new_tokens ({request.max_new_tokens}) exceed the "
            f"{self.allocator.num_pages * self.allocator.page_size} tokens that layers with a window have room for",
            status=400,
        )

    def fits(self, request: Request, *, without: Sequence[Request] = ()) -> bool:
        bounds = [bound for r, bound in self._bounds.items() if r not in without]
        quarantined = self.allocator.counts()["quarantined"]
        return self._most([*bounds, self._bound(request)]) <= self.allocator.num_pages - quarantined

    def _most(self, bounds: list[tuple[int, int]]) -> int:
        """Minimum of two bounds: windows plus prompt tokens in flight, and whole requests."""
        in_flight = self.allocator.pages_for((self._step_tokens or 0) * self._steps)
        return min(sum(w for w, _ in bounds) + in_flight, sum(t for _, t in bounds))

    def _bound(self, request: Request) -> tuple[int, int]:
        """(window pages at any time, pages of all tokens), with answer tokens in flight."""
        whole = self.allocator.pages_for(request.num_tokens + request.tokens_left)
        if self._step_tokens is None:
            return whole, whole
        return min(whole, self.allocator.pages_for(self.window - 1 + self._answer_tokens) + 2), whole

    # ---- requests

    def open(self, request: Request, match: Match, *, lands: bool) -> None:
        if lands:
            self.adopt(request)
        else:
            self.begin(request, match.window)

    def begin(self, request: Request, cached: Sequence[int]) -> None:
        """Start with `cached` tree pages and lock the last window, which is complete."""
        self._bounds[request] = self._bound(request)
        first = self.first_page(len(cached) * self.allocator.page_size)
        request.windows.pages = [0] * first + list(cached[first:])
        request.windows.first = first
        for page in request.windows.pages[first:]:
            self._readers[page] += 1
            self._idle.pop(page, None)

    def adopt(self, request: Request) -> None:
        """Allocate the last window of tokens with KV from elsewhere (all, or all but the last)."""
        self._bounds[request] = self._bound(request)
        first = self.first_page(request.num_tokens - 1)
        request.windows.pages = [0] * first + self._take(self.allocator.pages_for(request.num_tokens) - first)
        request.windows.first = first

    def tail(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        return (self.window_of(request, num_tokens),)

    def window_of(self, request: Request, num_tokens: int) -> list[int]:
        return request.windows.pages[self.first_page(num_tokens) : self.allocator.pages_for(num_tokens)]

    def lend(self, request: Request, match: Match) -> bool:
        if match.pages and self.fits(request):
            self.begin(request, match.window)
            return True
        return not match.pages

    def landed_extra(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        given = self.window_of(request, len(request.windows.pages) * self.allocator.page_size)
        return (given[: self.allocator.pages_for(num_tokens) - self.first_page(num_tokens)],)

    def arrange_landed(self, request: Request) -> None:
        (landed,) = self.landed_extra(request, request.computed_len)
        unused = [page for page in request.windows.pages[request.windows.first :] if page not in landed]
        self.allocator.free(unused)
        request.windows.first = self.first_page(request.computed_len)
        request.windows.pages = [0] * request.windows.first + landed

    def detach(self, request: Request) -> Sequence[tuple[PageAllocator, list[int]]]:
        if not request.pages:
            return []
        pages = request.windows.pages[request.windows.first :]
        self.allocator.quarantine(pages)
        request.windows.pages, request.windows.first = [], 0
        del self._bounds[request]
        return [(self.allocator, pages)]

    def extend(self, request: Request, end: int, *, answer: bool) -> None:
        missing = self.allocator.pages_for(end) - len(request.windows.pages)
        if missing > 0:
            request.windows.pages += self._take(missing)

    def retire(self, request: Request) -> None:
        first = min(self.first_page(request.computed_len), len(request.windows.pages))
        for i in range(request.windows.first, first):
            self._release(request.windows.pages[i])
            request.windows.pages[i] = 0
            self.num_retired += 1
        request.windows.first = max(request.windows.first, first)

    def free(self, request: Request) -> None:
        for page in request.windows.pages[request.windows.first :]:
            self._release(page)
        request.windows.pages, request.windows.first = [], 0
        self._bounds.pop(request, None)

    def own(self, request: Request) -> list[int]:
        return [page for page in request.windows.pages if page and self.allocator.state_of(page) == "held"]

    def _release(self, page: int) -> None:
        if page not in self._readers:
            self.allocator.free([page])
            return
        self._readers[page] -= 1
        if self._readers[page] == 0:
            self._idle[page] = None

    def _take(self, n: int) -> list[int]:
        while self.allocator.num_free < n:
            self._evict(next(iter(self._idle)))
        return self.allocator.allocate(n)

    # ---- the tree

    def usable(self, cached: Sequence[int], *, depth: int = 0, alive: int = 0) -> int:
        """Longest prefix of `cached` (0: missing page) with a complete last window.

        It follows `depth` pages, of which the last `alive` are present.
        """
        best = 0
        for i, page in enumerate(cached, 1):
            alive = alive + 1 if page else 0
            length = depth + i
            if alive >= length - self.first_page(length * self.allocator.page_size):
                best = i
        return best

    def usable_match(self, cache: RadixCache, tokens: Sequence[int], branch: Branch) -> Match:
        """A prefix is usable if its last window is complete."""
        found = [page for node, shared in cache.path(tokens, branch=branch) for page in node.window[:shared]]
        usable = self.usable(found)
        match = cache.match(tokens[: usable * cache.page_size], branch=branch)
        return Match(match.pages, match.node, window=tuple(found[:usable]))

    def is_whole(self, cached: Sequence[int]) -> bool:
        return all(cached[self.first_page(len(cached) * self.allocator.page_size) :])

    def reach(self, node: Node) -> int:
        """Pages of `node` up to its last length with a complete window."""
        _, *path = node.up()
        before = (page for above in path for page in reversed(above.window))
        alive = sum(1 for _ in takewhile(bool, islice(before, 1 + self.window)))
        return self.usable(node.window, depth=sum(len(above.pages) for above in path), alive=alive)

    def on_stored(self, node: Node) -> None:
        node.window = [0] * len(node.pages)

    def share(self, request: Request, inserted: Inserted, *, start: int, end: int) -> None:
        for at in inserted.node.up():
            if end <= start:
                return
            begin = end - len(at.pages)
            for i in range(max(begin, start, request.windows.first), end):
                page = request.windows.pages[i]
                if not at.window[i - begin] and page not in self._readers:
                    self.allocator.to_cache([page])
                    at.window[i - begin] = page
                    self._readers[page], self._homes[page] = 1, at
                    self.on_change(at)
            end = begin

    def on_split(self, upper: Node, lower: Node) -> None:
        cut = len(upper.pages)
        upper.window, lower.window = lower.window[:cut], lower.window[cut:]
        self._homes.update((page, upper) for page in upper.window if page)

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        for page in [page for page in node.window if page]:
            self._evict(page)

    def check_node(self, node: Node) -> None:
        assert len(node.window) == len(node.pages), "a page in the tree without a place for its window page"

    def _evict(self, page: int) -> None:
        node = self._homes.pop(page)
        node.window[node.window.index(page)] = 0
        self.on_change(node)
        readers = self._readers.pop(page)
        assert readers == 0, f"window page {page} goes while a request reads it"
        del self._idle[page]
        self.allocator.evict([page])

    # ---- reports

    def gauges(self) -> dict[str, float]:
        return {"swa_token_usage": 1 - self.num_available / self.allocator.num_pages}

    def check(self, requests: Sequence[Request]) -> None:
        self.allocator.check()
        held = [page for r in requests for page in self.own(r)]
        assert len(held) == len(set(held)) == self.allocator.counts()["held"], "held window pages and owners differ"
        reads = [page for r in requests for page in r.windows.pages if page and page in self._readers]
        readers = Counter(reads)
        assert all(self._readers[page] == n for page, n in readers.items()), "readers of window pages are lost"
        assert sum(self._readers.values()) == len(reads)
        assert set(self._idle) == {page for page, readers in self._readers.items() if not readers}
        assert all(page in node.window and node.parent is not None for page, node in self._homes.items())
        assert len(self._homes) == len(self._readers) == self.allocator.counts()["cached"]
        assert {r for r in requests if r.pages} == set(self._bounds), "bounds of requests without memory"
        bounds = list(self._bounds.values())
        most, quarantined = self._most(bounds), self.allocator.counts()["quarantined"]
        held_or_read = sum(1 for r in requests for page in r.windows.pages if page)
        assert most <= self.allocator.num_pages - quarantined, "more is admitted than there is room for"
        assert held_or_read <= most, "more is held than admitted"
        for r in requests:
            assert all(r.windows.pages[r.windows.first :]), f"{r.rid} lost a page of its window"
            assert not any(r.windows.pages[: r.windows.first]), f"{r.rid} keeps pages behind its window"
