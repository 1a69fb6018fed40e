"""Engines whose drafter always drafts, whatever steps cost on this machine; and what its drafts came to."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.speculative.drafts import Draft
from tests.core.guesses import Free, drafting_of
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import ranks


def always(scheduler: Scheduler) -> None:
    """Let all drafts pay."""
    drafting = drafting_of(scheduler)
    drafting.costs, drafting.pass_costs = Free(), Free(passes=True)


@dataclass(frozen=True)
class Fared:
    """`passes`: steps of the drafter."""

    passes: int
    drafts: int
    accepted: int


def fared(engine: EngineInProcess) -> Fared:
    counters = engine.parts.scheduler.counters
    return Fared(counters.draft_steps, counters.drafts, counters.accepted_drafts)


@contextmanager
def engine_of(path: str, *, tp_size: int, **flags: Any) -> Iterator[EngineInProcess]:
    """An engine of one rank, or the leader of several."""
    if tp_size == 1:
        with EngineInProcess(path, **flags) as engine:
            yield engine
        return
    with ranks(path, tp_size=tp_size, **flags) as group:
        yield group.engine


def answers_to(engine: EngineInProcess, prompts: Sequence[list[int]], *, new: int) -> list[list[int]]:
    """Run all prompts together; return the tokens of each."""
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, max_new_tokens=new)
    engine.run()
    return [engine.tokens[f"r{i}"] for i in range(len(prompts))]


def spoil_all_but_the_first(engine: EngineInProcess) -> None:
    """Make drafts wrong on their way from the executor to the core, but for the first of each pass."""
    executor: Any = engine.parts.executor
    collect = executor.collect

    def with_wrong_drafts(launch: Any) -> StepResult:
        result: StepResult = collect(launch)
        for item in result.items:
            item.drafted[1:] = [guess._replace(token=guess.token - 1) for guess in item.drafted[1:]]
        return result

    executor.collect = with_wrong_drafts


KINDS = ("right", "wrong", "half", "mixed")


class KnownAnswers:
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


def draft_from(scheduler: Scheduler, answers: Mapping[str, Sequence[int]], kind: str, *, most: int) -> None:
    """Let an engine with NGRAM draft from `answers`, whatever its steps cost and however drafts have fared."""
    always(scheduler)
    drafting = drafting_of(scheduler)
    drafting._chances.of_match = lambda drafts, match: 0.9  # type: ignore[method-assign]
    drafting._drafter = KnownAnswers(answers, kind, most=most)
