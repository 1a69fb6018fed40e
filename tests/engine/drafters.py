"""Engines whose drafter always drafts, whatever steps cost on this machine; and what its drafts came to."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.drafts import Draft
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from tests.core.guesses import FreePasses, FreeRows
from tests.engine.engine_in_process import EngineInProcess


def always(scheduler: Scheduler) -> None:
    """Let all drafts pay."""
    assert scheduler.drafting is not None
    scheduler.drafting.costs, scheduler.drafting.pass_costs = FreeRows(), FreePasses()


@dataclass(frozen=True)
class Fared:
    """`passes`: steps of the drafter."""

    passes: int
    drafts: int
    accepted: int


def fared(engine: EngineInProcess) -> Fared:
    counters = engine.parts.scheduler.counters
    return Fared(counters.draft_steps, counters.drafts, counters.accepted_drafts)


KINDS = ("right", "wrong", "half", "mixed")


class Told:
    """A drafter that knows the answers: its drafts are right, wrong, right up to the middle, or both in turn and of any length.

    `answers`: by request. `kind`: of KINDS. `most`: tokens of a draft.
    """

    def __init__(self, answers: Mapping[str, Sequence[int]], kind: str, *, most: int) -> None:
        self._answers = answers
        self._kind = kind
        self._most = most
        self._random = random.Random(3)

    def draft(self, request: Request) -> Draft:
        known = len(request.output_ids)
        length = self._most if self._kind != "mixed" else self._random.randint(0, self._most)
        coming = self._answers[request.rid][known : known + length]
        return Draft([token ^ self._is_wrong(at) for at, token in enumerate(coming)], match=2)

    def _is_wrong(self, at: int) -> bool:
        wrong = {"right": False, "wrong": True, "half": at >= self._most // 2}
        return wrong[self._kind] if self._kind in wrong else self._random.random() < 0.3


def tell(scheduler: Scheduler, answers: Mapping[str, Sequence[int]], kind: str, *, most: int) -> None:
    """Let an engine with NGRAM draft from `answers`, whatever its steps cost and however drafts have fared."""
    always(scheduler)
    assert scheduler.drafting is not None
    scheduler.drafting._chance = lambda drafts, match: 0.9  # type: ignore[method-assign]
    scheduler.drafting._drafter = Told(answers, kind, most=most)
