"""Speculative decoding: which requests get drafts, and how long ones, so that a step yields the most tokens a second.

A draft guesses the tokens that a request samples next. Each drafted token is one more row of a decode step: it reads the draft, and
samples what follows. Results (engine/core/results.py) keep a row if the row before it sampled exactly its draft. A sample is a function of
seed, position and logits alone, so the tokens are those of plain decoding at any temperature, and nothing is drawn twice.

Rows are taken in the order of the chance that they are kept, as many as give most of

    tokens that the step is expected to yield / seconds that so many rows take

Chances come from how drafts behind such matches fared, also those that were not computed; seconds from RowCosts. So in a full batch, where
rows cost, drafts become short and end.

A drafter that is a model drafts in the executor (engine/executor/draft_pass.py), in steps of its own that come when decodes have none:
`ask` says how many tokens, its passes being a part of the seconds. What comes back is a draft as any other.
"""

import math
from bisect import bisect
from collections.abc import Sequence
from typing import Protocol

from engine.core.drafts import FORCED, MODELED, NO_DRAFT, Chance, Draft, Drafts
from engine.core.hooks import Grammar
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.row_costs import RowCosts

MATCHES = (3, 4, 6, 9, 17, MODELED, FORCED)  # first length of each class of matches but the shortest
FIRST_CHANCES = (0.4, 0.55, 0.7, 0.8, 0.87, 0.92, 0.7, 0.98)  # by class
TRUST = 8.0  # drafted tokens that weigh as much as FIRST_CHANCES
TRUST_OF_CLASS = 4.0  # that weigh in a request's chance as much as its class of matches
KEPT, KEPT_OF_REQUEST = 0.998, 0.95  # weight of a drafted token when the next one is known
NEVER, SURE = 0.01, 0.99
LEAST = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # chances down to which rows are taken, tried in turn
LEAST_GAIN = 0.1  # by which drafts must promise more tokens a second: both estimates err
OVERLAP_GAIN = 0.1  # what overlap saves, which a step with drafts does without
PASS_SHARE = 0.1  # of a step with as many rows, that a pass of the executor's drafter takes, until one was measured
TRY_EVERY = 64  # steps without drafts until the executor's drafter is asked all the same: chances and costs change


class Drafter(Protocol):
    def draft(self, request: Request) -> Draft:
        """Guess what follows the known tokens of `request`; called once for each length."""


class Costs(Protocol):
    def step(self, rows: int) -> float:
        """Predict what a decode step takes."""

    def note(self, rows: int, taken_s: float) -> None:
        """Learn from a decode step."""


class Drafting:
    """`drafter`: None: only what a grammar forces is drafted, and `passes` tokens at most by the executor's drafter; 0: it has none.

    `most`: drafted tokens of a request in a step. `counts`: whether penalties can be computed for several rows of a request.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        *,
        most: int,
        passes: int = 0,
        counts: bool = True,
        costs: Costs | None = None,
        pass_costs: Costs | None = None,
    ) -> None:
        self.costs: Costs = costs or RowCosts()
        self.pass_costs: Costs | None = pass_costs  # None: no pass was measured
        self.passes = passes
        self._steps_without = 0
        self._drafter = drafter
        self._most = most
        self._counts = counts
        self._of_match = [Chance() for _ in FIRST_CHANCES]

    def able(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return those that drafts may be found for."""
        drafts_for_all = self._drafter is not None or self.passes
        return requests if drafts_for_all else [r for r in requests if r.grammar is not None]

    def ask(self, requests: Sequence[Request], *, rows: int, overlaps: bool) -> dict[str, int]:
        """Return how many tokens the executor's drafter is to draft for those of `requests` that have no draft; the rest as of `choose`.

        As many as give most tokens a second in the step that follows.
        """
        bare = [r for r in requests if not self._draft(r).tokens and self._may_ask(r)] if self.passes else []
        if not bare:
            return {}
        count = self._best_count(bare, rows, overlaps=overlaps)
        self._steps_without = 0 if count else self._steps_without + 1
        if self._steps_without == TRY_EVERY:
            count, self._steps_without = 1, 0
        return {r.rid: min(count, r.samples_left - 1) for r in bare} if count else {}

    def _may_ask(self, request: Request) -> bool:
        return self._can_draft(request) and request.drafts.asked_at < request.num_tokens and request.samples_left > 1

    def _best_count(self, bare: Sequence[Request], rows: int, *, overlaps: bool) -> int:
        chances = [self._chance(r.drafts, MODELED) for r in bare]
        best, best_rate = 0, self._least_rate(rows, overlaps=overlaps)
        for count in range(1, self.passes + 1):
            tokens = rows + sum(_expected(chance, count) for chance in chances)
            seconds = self.costs.step(rows + count * len(bare)) + count * self._pass(len(bare))
            if (rate := tokens / seconds) > best_rate:
                best, best_rate = count, rate
        return best

    def _pass(self, rows: int) -> float:
        """Predict what a pass of the executor's drafter takes."""
        return PASS_SHARE * self.costs.step(rows) if self.pass_costs is None else self.pass_costs.step(rows)

    def _least_rate(self, rows: int, *, overlaps: bool) -> float:
        """Tokens a second that drafts must promise."""
        return (1 + LEAST_GAIN + OVERLAP_GAIN * overlaps) * rows / self.costs.step(rows)

    def choose(self, requests: Sequence[Request], *, rows: int, overlaps: bool) -> dict[str, list[int]]:
        """Return drafts of the next step for `requests`, which are `able`. `rows`: of the step without drafts, `overlaps`: then another one."""
        found = [(r, draft, self._chance(r.drafts, draft.match)) for r in requests if (draft := self._draft(r)).tokens]
        best = dict[str, list[int]]()
        if not found:
            return best
        plain, best_rate = rows, self._least_rate(rows, overlaps=overlaps)
        for least in LEAST:
            rows, tokens, chosen = plain, float(plain), dict[str, list[int]]()
            for request, draft, chance in found:
                count = min(_rows_above(least, chance), len(draft.tokens), request.samples_left - 1, self._most)
                if count > 0:
                    chosen[request.rid] = draft.tokens[:count]
                    rows += count
                    tokens += _expected(chance, count)
            if (rate := tokens / self.costs.step(rows)) > best_rate:
                best, best_rate = chosen, rate
        return best

    def note(self, plan: Plan, taken_s: float) -> None:
        """Learn from a step that took `taken_s`."""
        if plan.extend or not plan.items or taken_s <= 0:
            return
        if plan.rewinds and not plan.only_drafts and not any(item.draft for item in plan.items):
            return  # rows without drafts do not cost what those of an earlier step leave to be done
        if not plan.only_drafts:
            self.costs.note(len(plan.items), taken_s)
            return
        self.pass_costs = self.pass_costs or RowCosts()
        self.pass_costs.note(len(plan.items), taken_s / max(item.to_draft for item in plan.items))

    def _draft(self, request: Request) -> Draft:
        drafts = request.drafts
        if not self._can_draft(request):
            return NO_DRAFT
        if drafts.known < request.num_tokens:
            self._score(request)
            drafts.draft, drafts.known = self._guess(request), request.num_tokens
        return drafts.draft

    def _can_draft(self, request: Request) -> bool:
        sampling = request.sampling
        ends_late = sampling.min_new_tokens > 0 and (sampling.stop or sampling.stop_regex)  # engine/loop/stream_gate.py
        return not ends_late and (self._counts or not sampling.penalized)

    def _guess(self, request: Request) -> Draft:
        grammar = request.grammar
        if grammar is not None and (forced := grammar.forced()):
            return Draft(fitting(grammar, forced), FORCED)
        draft = NO_DRAFT if self._drafter is None else self._drafter.draft(request)
        return draft if grammar is None else Draft(fitting(grammar, draft.tokens), draft.match)

    def _score(self, request: Request) -> None:
        """Note how far the last draft was right, whether it was computed or not."""
        drafts = request.drafts
        guesses, of_match = drafts.draft.tokens, self._of_match[bisect(MATCHES, drafts.draft.match)]
        for guess, token in zip(guesses, request.tokens(drafts.known, request.num_tokens), strict=False):
            of_match.note(hit=guess == token, kept=KEPT)
            drafts.chance.note(hit=guess == token, kept=KEPT_OF_REQUEST)
            if guess != token:
                return

    def _chance(self, drafts: Drafts, match: int) -> float:
        kind = bisect(MATCHES, match)
        of_match = self._of_match[kind].value(FIRST_CHANCES[kind], TRUST)
        return min(SURE, max(NEVER, drafts.chance.value(of_match, TRUST_OF_CLASS)))


def fitting(grammar: Grammar, tokens: Sequence[int]) -> list[int]:
    """`tokens` before the first that may not stand, or that ends the grammar: nothing is sampled behind it."""
    fork = grammar.fork() if tokens else grammar
    for i, token in enumerate(tokens):
        if not fork.accept(token) or fork.ended:
            return list(tokens[:i])
    return list(tokens)


def _expected(chance: float, count: int) -> float:
    """Tokens that `count` drafts are expected to add."""
    return chance * (1 - chance**count) / (1 - chance)


def _rows_above(least: float, chance: float) -> int:
    """How many rows are kept with a chance of at least `least`; row j is with chance**j."""
    return int(math.log(least) / math.log(chance))
