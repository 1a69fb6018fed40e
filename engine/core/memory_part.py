"""Parts of the memory of requests: the hooks that Memory and the scheduler call on each.

Memory and the tree call the parts in the order in which the assembler (engine/build.py) lists them: the host tier, recurrent
states, pages of windows, features of images. They rely on no other order, and on no part being there. A part that follows the
nodes of the tree is a TreePart (radix_node.py), too.

What a single part decides is no hook of all: planning looks it up by its kind (`Memory.of`), and gets the class here, which
decides as a model without such a part does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from engine.core.lanes import Lane
from engine.core.page_allocator import PageAllocator
from engine.core.plan import Plan
from engine.core.radix_cache import Inserted, Match
from engine.core.request import Request
from engine.messages import FinishReason

if TYPE_CHECKING:
    from engine.core.memory import Memory


P = TypeVar("P")


class MemoryPart:
    """The base of parts; a hook that a part does not have does nothing. `name`: of its check."""

    name = ""

    @property
    def allocators(self) -> tuple[PageAllocator, ...]:
        """Return the allocators of what requests hold of this part."""
        return ()

    # ---- admission

    def refusal(self, request: Request, *, part_tokens: int) -> FinishReason | None:
        """Return why `request` can never run here, or None. `part_tokens`: the fewest of a prompt that a step computes."""
        return None

    def fits(self, request: Request, *, without: Sequence[Request] = ()) -> bool:
        """Whether there is room for `request` beside the others, once `without` have left."""
        return True

    def open(self, request: Request, match: Match, *, lands: bool) -> None:
        """Take what an admitted request needs, before it has pages and while it does not lock `match`.

        `lands`: the content comes from elsewhere.
        """

    def start(self, request: Request, match: Match, *, lands: bool) -> None:
        """Go on with admission, now that the request has its pages, of which those of `match` are computed."""

    # ---- steps of a request

    def extend(self, request: Request, end: int, *, answer: bool) -> None:
        """Take what the tokens before `end` need in the step that is being planned; there is room. `answer`: it decodes."""

    def retire(self, request: Request) -> None:
        """Give back what nothing reads behind the tokens that have been computed."""

    def share(self, request: Request, inserted: Inserted, *, start: int, end: int) -> None:
        """Give what belongs to pages `start`..`end` - 1 of the request to the tree, which has got these pages."""

    # ---- ends

    def free(self, request: Request) -> None:
        """Take back all that the request has. No step of it may be in flight."""

    def detach(self, request: Request) -> Sequence[tuple[PageAllocator, list[int]]]:
        """Put what a transfer peer may still write into quarantine, and return it with its allocator."""
        return ()

    def tail(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        """Return what a hand-over of the first `num_tokens` tokens brings along beside pages."""
        return ()

    def forget(self, *, files: bool) -> None:
        """Forget all that later requests could find (`files`: on disk, too). No step may be in flight."""

    # ---- plans

    def asks_for_a_step(self, lane: Lane | None) -> bool:
        """Whether a step of `lane` is needed even if no request has tokens for it."""
        return False

    def attach(self, plan: Plan) -> None:
        """Put what was requested since the last plan into this one."""

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        """Take note of a collected step. `failed`: the device had no memory for it."""

    # ---- reports

    def counters(self) -> dict[str, float]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless everything is accounted for. `requests`: all that are live."""


def part_of(kind: type[P], parts: Sequence[MemoryPart]) -> P | None:
    """Return the part of this kind, if there is one."""
    return next((part for part in parts if isinstance(part, kind)), None)


# ---- what a single part decides for planning


class StepEnds:
    """Where steps end, and what they leave for later requests. Plain: a step may end anywhere, and leaves nothing.

    `one_verify_step`: no step verifies drafts while another one does.
    """

    one_verify_step = False

    @property
    def most_drafted(self) -> int | None:
        """Return how many requests of a step may verify drafts; None: any number."""
        return None

    def cut(self, request: Request, start: int, end: int) -> int:
        """Return how far a step may compute that is to compute tokens `start`..`end` of a prompt."""
        return end

    def cut_answer(self, request: Request, start: int, end: int) -> int:
        """Return how far a step may verify drafts that is to compute tokens `start`..`end` of an answer."""
        return end

    def keep(self, request: Request, at: int, memory: "Memory") -> None:
        """Give what the collected step left after `at` tokens to the tree."""

    def reject(self, request: Request, at: int) -> None:
        """Take back what a step has made behind a rejected draft, the last token of the first `at`."""


class Windows:
    """Which pages of windows a request has. Plain: none."""

    def window_of(self, request: Request, num_tokens: int) -> list[int]:
        """Return the pages that the query behind `num_tokens` tokens reads."""
        return []


class Features:
    """Room for the features of a prompt's images. Plain: the model sees no images.

    `part`: the fewest tokens of a prompt that a step computes.
    """

    sees_images = False

    def has_room(self, request: Request, part: int) -> bool:
        """Whether any `part` tokens of the prompt have room beside features in use."""
        return True

    def may_go_on(self, request: Request, part: int) -> bool:
        """Whether the next `part` tokens have room."""
        return True

    def reach(self, request: Request, start: int, *, part: int, budget: float) -> tuple[int, float]:
        """Return how far a step may compute from `start`, and the rest of its `budget` of tokens."""
        return request.num_tokens, budget

    def use(self, request: Request, start: int, end: int) -> int:
        """Provide the features of tokens `start`..`end` - 1 for a step; return how many tokens it encodes for that."""
        return 0


class LowerTier:
    """A tier below the device's prefix cache. Plain: there is none.

    `pages_ahead_left`: that the next step may still load for requests that wait.
    """

    pages_ahead_left = 0

    @property
    def files_come(self) -> bool:
        """Whether pages of files are being read."""
        return False

    def prefetch(self, request: Request, memory: "Memory") -> None:
        """Start to read what lies on disk alone of its prefix."""

    def awaits(self, request: Request, now_s: float) -> bool:
        """Whether `request` waits for its prefix to be read from disk."""
        return False

    def load_ahead(self, request: Request, memory: "Memory", *, earlier: Sequence[Request], most: int) -> None:
        """Load up to `most` pages that continue the cached prefix of a waiting request, as evictable pages of the tree."""

    def is_settled(self, pages: Sequence[int]) -> bool:
        """Whether no step that was planned still copies one of `pages` to the tier, or from there."""
        return True
