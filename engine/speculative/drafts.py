"""Draft chains and trees of a request, and their results.

known  + a + d            parents  -1  0  0 -1  3        of a, d, e, b, c: indices in the draft
       |   + e
       + b + c
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.core.plan import Guess
from engine.core.request import Request
from engine.messages import DraftCounts


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidate tokens; `match`: length of the n-gram match, or MODELED, FORCED.

    `parents`: index of each predecessor, -1 for known tokens; () is a chain. `confidences`: the
    drafter's per token, given a right predecessor.
    """

    tokens: list[int]
    match: int
    parents: Sequence[int] = ()
    confidences: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, parent: int) -> list[int]:
        """Successors of token `parent`, -1 for the known ones."""
        if self.parents:
            return [i for i, above in enumerate(self.parents) if above == parent]
        return [parent + 1] if parent + 1 < len(self.tokens) else []

    def part(self, chosen: Sequence[int]) -> "Draft":
        """`chosen` tokens, parents first."""
        number = {-1: -1} | {old: new for new, old in enumerate(chosen)}
        return Draft(
            [self.tokens[i] for i in chosen],
            self.match,
            [number[self.parents[i]] for i in chosen] if self.parents else (),
            [self.confidences[i] for i in chosen] if self.confidences else (),
        )

    def first(self, count: int) -> "Draft":
        """The first `count` tokens; trees are sorted by probability."""
        if count >= len(self.tokens):
            return self
        return Draft(self.tokens[:count], self.match, self.parents[:count], self.confidences[:count])

    def path(self) -> "Draft":
        return self.part(self.first_path())

    def first_path(self) -> list[int]:
        chosen, at = list[int](), -1
        while below := self.children(at):
            at = below[0]
            chosen.append(at)
        return chosen


def draft_of(guesses: Sequence[Guess]) -> Draft:
    if not guesses:
        return NO_DRAFT
    tokens, parents, confidences = zip(*guesses, strict=True)
    return Draft(list(tokens), MODELED, parents, confidences)


NO_DRAFT = Draft([], 0)
FORCED = 1 << 30  # match of grammar-forced tokens
MODELED = FORCED - 1  # match of tokens from the executor's drafter


@dataclass(slots=True)
class Chance:
    """Acceptance probability from counts with decay."""

    hits: float = 0.0
    tries: float = 0.0

    def note(self, *, hit: bool, kept: float) -> None:
        self.hits = self.hits * kept + hit
        self.tries = self.tries * kept + 1

    def value(self, prior: float, trust: float) -> float:
        """Hit rate with `trust` prior tries."""
        return (self.hits + prior * trust) / (self.tries + trust)


@dataclass(slots=True, eq=False)
class Drafts:
    """Drafts of one request; `draft` follows its first `known` tokens, `rows` are in flight.

    - is_asked: a draft step is in flight; asked_at: known tokens at the last one, at least
    - unseen: drafts of this step that may be verified before its result
    - last: in a collected step, the item of the newest token
    - is_able: its steps may have drafts
    """

    draft: Draft = NO_DRAFT
    known: int = 0
    chance: Chance = field(default_factory=Chance)
    index: Any = None
    rows: int = 0
    is_asked: bool = False
    asked_at: int = 0
    unseen: int = 0
    last: int = -1
    is_able: bool = False
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def count(request: Request, *, steps: int = 0, drafted: int = 0, accepted: int = 0) -> None:
    """Its outputs report the counts from its first step on."""
    drafts = request.of(Drafts)
    drafts.steps += steps
    drafts.drafted += drafted
    drafts.accepted += accepted
    if drafts.steps:
        request.stats.drafts = DraftCounts(drafts.steps, drafts.drafted, drafts.accepted)


# ---- Placeholders of tokens that the executor keeps by slot (futures.py).


SLOTS = 1 << 20  # more than an engine has; placeholders of the future map are lower


def placeholder(slot: int, number: int) -> int:
    """Return that of draft `number` from 1 on, or of the newest token that counts (0)."""
    return -(1 + (1 + number) * SLOTS + slot)


def number_of(placeholder: int) -> int:
    return (-placeholder - 1) // SLOTS - 1


class DraftRow(NamedTuple):
    """Row of a step that verifies a draft tree.

    `depth` after the known token; `behind`: distance to the row that samples it; KV `place`. Rows
    are by depth, so lengths do not decrease. The first-candidate path has its own places; others
    follow, and move if accepted (engine/speculative/draft_pass.py).

        known  + a + d            rows     known  a  b  d  e  c
               |   + e            depth      0    1  1  2  2  2
               + b + c            place      0    1  3  2  4  5        behind the known tokens
    """

    token: int
    depth: int
    behind: int
    place: int


def rows_of(draft: Draft) -> list[DraftRow]:
    if not draft.parents:
        return [DraftRow(token, depth, 1, depth) for depth, token in enumerate(draft.tokens, 1)]
    depths = _depths(draft)
    order = sorted(range(len(draft)), key=depths.__getitem__)
    row_of = {-1: -1} | {token: row for row, token in enumerate(order)}
    places = _places(draft, depths)
    return [
        DraftRow(draft.tokens[i], depths[i], row - row_of[draft.parents[i]], places[i]) for row, i in enumerate(order)
    ]


def _depths(draft: Draft) -> list[int]:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _places(draft: Draft, depths: list[int]) -> list[int]:
    places = {i: depths[i] for i in draft.first_path()}
    behind = iter(range(len(places) + 1, len(draft) + 1))
    return [places[i] if i in places else next(behind) for i in range(len(draft))]
