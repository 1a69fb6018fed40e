"""Engines whose drafter always drafts, whatever steps cost on this machine; and what its drafts came to."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import LogprobOptions
from engine.speculative.drafts import Draft
from tests.core.guesses import Free, drafting_of
from tests.engine.engine_in_process import EngineInProcess


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


def answers_to(engine: EngineInProcess, prompts: Sequence[list[int]], *, new: int) -> list[list[int]]:
    """Run all prompts together; return the tokens of each."""
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, max_new_tokens=new)
    engine.run()
    return [engine.tokens[f"r{i}"] for i in range(len(prompts))]


Answers = tuple[Any, ...]
# Few tokens are likely, so that their n-grams come again.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_k": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.3, "top_p": 0.8},
    "penalties": {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.05, "frequency_penalty": 0.02},
    "presence": {"presence_penalty": 0.05, "logit_bias": {21: 4.0, 22: 4.0, 23: 3.9}},
    "bias": {"temperature": 1.0, "logit_bias": {30: 40.0, 31: 40.0}},
    "rules": {"temperature": 1.0, "allowed_token_ids": (40, 41, 42)},
    "end": {"temperature": 1.0, "top_k": 3, "min_new_tokens": 20, "ignore_eos": False},
    "stop": {"temperature": 1.0, "logit_bias": {30: 40.0, 31: 40.0}, "stop_token_ids": (30,), "min_new_tokens": 30},
}
UNSURE = ("penalties", "presence", "min_p")  # counts of tokens in flight, or a bound that rounding moves, differ


def ask_all(engine: EngineInProcess, *, new: int = 40, length: int = 50, sure: bool = False) -> Answers:
    """Tokens, logprobs, hidden states and ends of `ASKED`, whose prompts have up to `length` tokens.

    `sure`: leave out requests whose drafts may be wrong though the drafter is right.
    """
    prompt = [20 + i * i % 11 for i in range(length)]
    for i, (name, sampling) in enumerate(ASKED.items()):
        if sure and (name in UNSURE or name == "stop"):
            continue
        wanted = {"return_hidden_states": i % 2 == 0}
        sampling = {"seed": i, "max_new_tokens": new, **sampling}
        engine.add(name, prompt[i:], logprobs=LogprobOptions(-1, 2), wanted=wanted, **sampling)
    engine.run()
    hidden = {name: b"".join(rows) for name, rows in engine.hidden.items()}  # several a step
    return engine.tokens, engine.logprobs, hidden, engine.finish


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
    drafting.drafter = KnownAnswers(answers, kind, most=most)
