"""Parts of request memory: hooks called by Memory, the tree and the scheduler.

Parts run in one order (engine/assembly/core.py lists them): host tier, recurrent states, window
pages, image features, backups. Parts that follow tree nodes are TreeParts (radix_cache.py), too.

Planning finds a part by class (`Memory.of`, whose defaults are the classes here), or all parts with
a hook (`Memory.having`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import Inserted, Match, Node
from engine.core.plan import Phase, Plan
from engine.core.request import Request
from engine.messages import FinishReason

if TYPE_CHECKING:
    from engine.core.memory import Memory


P = TypeVar("P")


class MemoryPart:
    """Empty hooks; `name` labels the check."""

    name = ""
    allocators: tuple[PageAllocator, ...] = ()

    # ---- admission

    def refusal(self, request: Request, *, part_tokens: int) -> FinishReason | None:
        """Return why `request` can never run, or None. `part_tokens`: the minimum chunk."""
        return None

    def fits(self, request: Request, *, without: Sequence[Request] = ()) -> bool:
        """Check for room, after `without` have left."""
        return True

    def open(self, request: Request, match: Match, *, lands: bool) -> None:
        """Allocate for an admitted request before its pages and the lock on `match`.

        With `lands` the content arrives from elsewhere.
        """

    def start(self, request: Request, match: Match, *, lands: bool) -> None:
        """Continue admission with pages allocated, of which those of `match` are computed."""

    # ---- steps of a request

    def extend(self, request: Request, end: int, *, answer: bool) -> None:
        """Allocate for tokens before `end`; there is room. `answer`: the request decodes."""

    def retire(self, request: Request) -> None:
        """Free memory behind computed tokens that nothing reads."""

    def share(self, request: Request, inserted: Inserted, *, start: int, end: int) -> None:
        """Give the tree what belongs to its new pages, `start`..`end` - 1 of the request."""

    # ---- ends

    def lend(self, request: Request, match: Match) -> bool:
        """Note what a peer reads, if there is room."""
        return True

    def landed_extra(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        """The written part of `tail`."""
        return self.tail(request, num_tokens)

    def arrange_landed(self, request: Request) -> None:
        """Place what a peer wrote."""

    def keep_landed(self, request: Request) -> None:
        """Cache what a peer wrote."""

    def free(self, request: Request) -> None:
        """No step of the request is in flight."""

    def detach(self, request: Request) -> Sequence[tuple[PageAllocator, list[int]]]:
        """Quarantine memory that a peer may write, and return it by allocator."""
        return ()

    def tail(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        """Extra memory of the first `num_tokens` tokens for a transfer."""
        return ()

    def forget(self, *, files: bool) -> None:
        """Forget reusable content (`files`: on disk, too); no step is in flight."""

    # ---- plans

    def asks_for_a_step(self, phase: Phase | None) -> bool:
        """Check for a required step without request tokens."""
        return False

    def attach(self, plan: Plan) -> None:
        """Add requested work to this plan."""

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        """Note a collected step; `failed`: out of device memory."""

    # ---- reports

    def counters(self) -> dict[str, float]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless all memory is accounted for."""


def part_of(kind: type[P], parts: Sequence[MemoryPart]) -> P | None:
    return next((part for part in parts if isinstance(part, kind)), None)


class StepEnds:
    """Step ends and their snapshots. By default steps end anywhere and leave nothing.

    `one_verify_step`: only one step in flight verifies drafts.
    """

    one_verify_step = False
    max_drafted: int | None = None  # requests per step that may verify drafts; None: any number

    def cut(self, request: Request, start: int, end: int) -> int:
        """The end of a prefill step for tokens `start`..`end`."""
        return end

    def cut_answer(self, request: Request, start: int, end: int) -> int:
        """The end of a verify step for tokens `start`..`end`."""
        return end

    def keep(self, request: Request, at: int, memory: "Memory") -> None:
        """Give the tree the snapshot of the collected step after `at` tokens."""

    def reject(self, request: Request, at: int) -> None:
        """Roll back state behind a rejected draft, the last of the first `at` tokens."""


class Windows:
    """Window pages of requests; none by default."""

    def window_of(self, request: Request, num_tokens: int) -> list[int]:
        """Pages read by the query after `num_tokens` tokens."""
        return []


class RetractedKV:
    """KV of retracted requests that is kept elsewhere; none by default: they are recomputed.

    `saved_tokens`, `restored_tokens`: since start.
    """

    saved_tokens = 0
    restored_tokens = 0

    @property
    def num_pages(self) -> int:
        return 0

    def begin(self, request: Request) -> bool:
        """Copy a retracted request's KV out; False: no KV, or no room."""
        return False

    def restore(self, request: Request) -> None:
        """Fill a readmitted request's memory, except cached pages."""
        raise AssertionError(f"{request.rid}: nothing of it is kept")

    def forget_copies(self) -> None:
        """Drop all copies, requested ones too; no step is in flight."""


class Features:
    """Room for image features; none are needed by default. `part`: the minimum chunk."""

    sees_images = False

    def has_room(self, request: Request, part: int) -> bool:
        """Check for room for any `part` tokens among features in use."""
        return True

    def may_go_on(self, request: Request, part: int) -> bool:
        """Check for room for the next `part` tokens."""
        return True

    def reach(self, request: Request, start: int, *, part: int, budget: float) -> tuple[int, float]:
        """The last possible end from `start`, and the remaining token `budget`."""
        return request.num_tokens, budget

    def use(self, request: Request, start: int, end: int) -> int:
        """Provide features of tokens `start`..`end` - 1; return the tokens encoded for it."""
        return 0


class LowerTier:
    """A tier below the device's prefix cache. `pages_ahead_left`: for the next step."""

    pages_ahead_left = 0

    @property
    def files_come(self) -> bool:
        """Check for file reads in progress."""
        return False

    def prefetch(self, request: Request, memory: "Memory") -> None:
        """Start reading the part of its prefix that is only on disk."""

    def awaits(self, request: Request, now_s: float) -> bool:
        """Check for disk reads that `request` waits for."""
        return False

    def load_ahead(self, request: Request, memory: "Memory", *, earlier: Sequence[Request], most: int) -> None:
        """Load up to `most` pages after a waiting request's cached prefix, as evictable pages."""

    def is_settled(self, pages: Sequence[int], *, state: int = 0) -> bool:
        """Check that no planned step still copies `pages` or `state`."""
        return True

    def on_state(self, node: Node, *, evicted: bool) -> None:
        """Note that the state of `node` came or goes."""

    def take_state(self) -> int | None:
        """The host's slot that `open` found."""
        return None
