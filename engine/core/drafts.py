"""What is drafted for a request, and how its drafts fared.

A drafter may guess several tokens for one place: then drafts are a tree, of which a step verifies the most probable part.

    known  + a + d            parents  -1  0  0 -1  3        of a, d, e, b, c: indices in the draft
           |   + e
           + b + c
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.messages import DraftCounts


@dataclass(frozen=True, slots=True)
class Draft:
    """`tokens` may come next. `match`: how many of the newest tokens occurred before them, or MODELED, FORCED.

    `parents`: of each token the index of the one that it follows, which comes before it; -1: it follows the known ones. Empty: each
    token follows the one before. `confidences`: of a drafter in each token, if the one that it follows is right; empty: it has none.
    """

    tokens: list[int]
    match: int
    parents: Sequence[int] = ()
    confidences: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, parent: int) -> list[int]:
        """Return the tokens that may follow token `parent`; -1: the known ones."""
        if self.parents:
            return [i for i, above in enumerate(self.parents) if above == parent]
        return [parent + 1] if parent + 1 < len(self.tokens) else []

    def part(self, chosen: Sequence[int]) -> "Draft":
        """Return the tokens `chosen`, in this order; each comes behind the one that it follows."""
        number = {-1: -1} | {old: new for new, old in enumerate(chosen)}
        return Draft(
            [self.tokens[i] for i in chosen],
            self.match,
            [number[self.parents[i]] for i in chosen] if self.parents else (),
            [self.confidences[i] for i in chosen] if self.confidences else (),
        )

    def first(self, count: int) -> "Draft":
        """Return the first `count` tokens; a tree's tokens are in the order of their chance."""
        if count >= len(self.tokens):
            return self
        return Draft(self.tokens[:count], self.match, self.parents[:count], self.confidences[:count])

    def path(self) -> "Draft":
        """Return the path of first children: a chain."""
        return self.part(self.first_path())

    def first_path(self) -> list[int]:
        """Return the indices of the path of first children."""
        chosen, at = list[int](), -1
        while below := self.children(at):
            at = below[0]
            chosen.append(at)
        return chosen


class Guess(NamedTuple):
    """A token that the executor's drafter guessed; `parent`, `confidence` as in Draft."""

    token: int
    parent: int
    confidence: float


def draft_of(guesses: Sequence[Guess]) -> Draft:
    """The guesses of the executor's drafter."""
    if not guesses:
        return NO_DRAFT
    tokens, parents, confidences = zip(*guesses, strict=True)
    return Draft(list(tokens), MODELED, parents, confidences)


NO_DRAFT = Draft([], 0)
FORCED = 1 << 30  # the match of tokens that a grammar forces
MODELED = FORCED - 1  # of those that a drafter of the executor computed


@dataclass(slots=True)
class Chance:
    """That a drafted token is right: counts, of which older ones count less."""

    hits: float = 0.0
    tries: float = 0.0

    def note(self, *, hit: bool, kept: float) -> None:
        """`kept`: weight of what was noted before."""
        self.hits = self.hits * kept + hit
        self.tries = self.tries * kept + 1

    def value(self, prior: float, trust: float) -> float:
        """The share of hits, with `trust` more tries of which `prior` hit."""
        return (self.hits + prior * trust) / (self.tries + trust)


@dataclass(slots=True, eq=False)
class Drafts:
    """The drafts of one request. `draft` follows its first `known` tokens; `rows`: drafted tokens in flight. `index`: the drafter's own.

    `is_asked`: the executor's drafter drafts for it in a step that is in flight; `asked_at`: its known tokens when it was asked last.

    `last`: of a step that is being collected, the item whose sample is the newest token. `is_able`: its decode steps may hold drafts;
    `steps`: those that gave it tokens; `drafted`, `accepted`: drafted tokens in them.
    """

    draft: Draft = NO_DRAFT
    known: int = 0
    chance: Chance = field(default_factory=Chance)
    index: Any = None
    rows: int = 0
    is_asked: bool = False
    asked_at: int = 0
    last: int = -1
    is_able: bool = False
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def counts(self) -> DraftCounts:
        return DraftCounts(self.steps, self.drafted, self.accepted)
