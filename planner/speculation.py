"""Speculation: real rows and passes (engine/core/drafting.py), right at the planned rate."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.drafting import Drafting
from engine.core.drafts import NO_DRAFT, Draft
from engine.core.request import Request
from engine.flags.speculation import drafts_by_model, rows_of_request
from planner.drafter import DrafterTime
from planner.executor import TOKEN

SEED = 3
MATCH = 1  # match class of n-grams with the lowest initial chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """At most `most` drafts per request and step, each right with `accept_rate` after right ones.

    `time`: of a drafting model; n-grams draft in `match_rate` of the steps.
    """

    most: int
    accept_rate: float
    time: DrafterTime | None
    match_rate: float = 1.0

    def drafting(self) -> Drafting:
        if self.time is None:
            return Drafting(Guesses(self.most, self.match_rate), most=self.most)
        return Drafting(None, most=self.most, passes=self.most)

    def draws(self) -> Callable[[], bool]:
        uniform = random.Random(SEED).random
        return lambda: uniform() < self.accept_rate


class Guesses:
    """Simulated n-grams: a random match now and then, with `most` tokens."""

    def __init__(self, most: int, match_rate: float) -> None:
        self._draft = Draft([TOKEN] * most, MATCH)
        self._match_rate = match_rate
        self._uniform = random.Random(SEED).random

    def draft(self, request: Request) -> Draft:
        return self._draft if self._uniform() < self._match_rate else NO_DRAFT


def speculation_of(
    engine: EngineConfig, *, accept_rate: float | None, match_rate: float, time: DrafterTime | None
) -> Speculation | None:
    """Return None without drafts. `engine` is resolved."""
    if engine.speculative_algorithm is None:
        return None
    by_model = drafts_by_model(engine)
    assert accept_rate is not None and by_model == (time is not None)
    return Speculation(most=rows_of_request(engine) - 1, accept_rate=accept_rate, match_rate=match_rate, time=time)
