"""Drafters that are right, wrong, or both in turn, about the model of hashes; and rows that always pay."""

import random
from functools import partial

from engine.core.request import Request
from engine.core.scheduler import MakeDecodeStrategy, Scheduler
from engine.speculative.decode_planning import SpeculativeDecode
from engine.speculative.drafting import Drafting
from engine.speculative.drafts import Draft
from tests.core.drafter_model import DrafterModel
from tests.core.hash_model import HashModel, next_token, prefix_hash, step_hash

KINDS = ("right", "wrong", "mixed")
MODELED = "modeled "  # before a kind: the executor's drafter drafts so
TREES = "trees "  # the same, several guesses for each place
TOPK = 3


class Free:
    """Costs that make every draft pay: of steps, which cost less with more rows, or of drafter `passes`."""

    def __init__(self, *, passes: bool = False) -> None:
        self._passes = passes

    def step(self, rows: int) -> float:
        return 0.0 if self._passes else 1 / rows

    def note(self, rows: int, taken_s: float) -> None:
        """Learn nothing."""


class Guesses:
    """`kind`: what it guesses, up to `most` tokens behind the known ones, also past the end of an answer. `model`: knows the weights."""

    def __init__(self, kind: str, *, most: int, model: HashModel) -> None:
        self._kind = kind
        self._most = most
        self._model = model
        self._random = random.Random(3)

    def draft(self, request: Request) -> Draft:
        value = prefix_hash(request.tokens(0, request.num_tokens), self._model.weights + request.variant.number)
        guesses = []
        for _ in range(self._random.randint(0, self._most)):
            right = next_token(value)
            is_wrong = self._kind == "wrong" or (self._kind == "mixed" and self._random.random() < 0.3)
            guesses.append((right + 1) % 50 if is_wrong else right)
            value = step_hash(value, guesses[-1])
        return Draft(guesses, match=2)


def drafting_of(scheduler: Scheduler) -> Drafting:
    assert isinstance(scheduler.decode, SpeculativeDecode)
    return scheduler.decode.drafting


def strategy(kind: str, *, most: int, model: HashModel, overlaps: bool = False) -> MakeDecodeStrategy:
    """Decode steps with `drafting` of these; `overlaps`: planned before the host has seen drafts of the executor."""
    by_model = kind.startswith((MODELED, TREES))
    return partial(SpeculativeDecode, drafting=drafting(kind, most=most, model=model), overlaps=overlaps and by_model)


def drafting(kind: str, *, most: int, model: HashModel) -> Drafting:
    """As `kind` says, or where it begins so by a drafter in the executor, which `model` gets."""
    for begin, topk in ((MODELED, 1), (TREES, TOPK)):
        if kind.startswith(begin):
            kind = kind.removeprefix(begin)
            model.drafter = DrafterModel(kind, kv=model.kv, at=model._at, page_size=model.page_size)
            passes = most if topk == 1 else max(1, most // 2)
            return Drafting(None, most=most, passes=passes, topk=topk, costs=Free(), pass_costs=Free(passes=True))
    return Drafting(Guesses(kind, most=most, model=model), most=most, costs=Free())
