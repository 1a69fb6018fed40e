"""What is drafted for a request, and how its drafts fared."""

from dataclasses import dataclass, field
from typing import Any

from engine.messages import DraftCounts


@dataclass(frozen=True, slots=True)
class Draft:
    """`tokens` may come next. `match`: how many of the newest tokens occurred before them, or MODELED, FORCED."""

    tokens: list[int]
    match: int


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
    """Of one request. `draft` follows its first `known` tokens; `rows`: drafted tokens in flight. `index`: the drafter's own.

    `is_asked`: the executor's drafter drafts for it in a step that is in flight; `asked_at`: its known tokens when it was asked last.

    `is_able`: its decode steps may hold drafts; `steps`: those that gave it tokens; `drafted`, `accepted`: drafted tokens in them.
    """

    draft: Draft = NO_DRAFT
    known: int = 0
    chance: Chance = field(default_factory=Chance)
    index: Any = None
    rows: int = 0
    is_asked: bool = False
    asked_at: int = 0
    is_able: bool = False
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def counts(self) -> DraftCounts:
        return DraftCounts(self.steps, self.drafted, self.accepted)
