"""Speculative decoding: choice of requests and draft lengths for the most tokens per second.

A draft token is another row of a decode step, which samples the next token. Verification accepts it
if the row before sampled exactly the draft. Samples depend on seed, position and logits only, so
tokens equal plain decoding's at any temperature.

Rows are taken by acceptance probability, in the number that maximizes

  expected tokens of the step / seconds of a step with these rows

Both are learned (Chances, RowCosts). A model drafter's steps count, too.
"""

from bisect import bisect, bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate, repeat
from operator import mul
from typing import Protocol

from engine.core.plan import Plan
from engine.core.request import Grammar, Request
from engine.speculative.drafts import FORCED, MODELED, NO_DRAFT, Chance, Draft, Drafts

# ---- Acceptance probabilities of draft tokens, learned from earlier drafts.

MATCHES = (3, 4, 6, 9, 17, MODELED, FORCED)  # first length of each class of matches but the shortest
FIRST_CHANCES = (0.4, 0.55, 0.7, 0.8, 0.87, 0.92, 0.7, 0.98)  # by class
CONFIDENCES = (
    0.02,
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    0.98,
    0.995,
)  # the same for a drafter's confidences
FIRST_OF_CONFIDENCE = (0.01, *CONFIDENCES)
FIRST_OF_OTHERS = 0.4
TRUST = 8.0  # draft tokens that weigh as much as FIRST_CHANCES
TRUST_OF_CLASS = 4.0  # weight of the class in a request's estimate
KEPT, KEPT_OF_REQUEST = 0.998, 0.95  # decay per draft token
NEVER, SURE = 0.01, 0.99


class Chances:
    def __init__(self) -> None:
        self._of_match = [Chance() for _ in FIRST_CHANCES]
        self._of_others = Chance()  # later candidates of a tree node, if the first is wrong
        self._of_confidence = {is_greedy: [Chance() for _ in FIRST_OF_CONFIDENCE] for is_greedy in (False, True)}

    def of_place(self, drafts: Drafts, topk: int) -> float:
        first = self.of_match(drafts, MODELED)
        return first if topk == 1 else min(SURE, first + (1 - first) * self._of_others.value(FIRST_OF_OTHERS, TRUST))

    def of_match(self, drafts: Drafts, match: int) -> float:
        kind = bisect(MATCHES, match)
        of_class = self._of_match[kind].value(FIRST_CHANCES[kind], TRUST)
        return min(SURE, max(NEVER, drafts.chance.value(of_class, TRUST_OF_CLASS)))

    def of_tokens(self, request: Request, draft: Draft) -> list[float]:
        """Probability of each token with all before it."""
        if not draft.confidences:
            return list(accumulate(repeat(self.of_match(request.of(Drafts), draft.match), len(draft.tokens)), mul))
        chances: list[float] = []
        for i, confidence in enumerate(draft.confidences):
            parent = draft.parents[i]
            chances.append(self._trusted(request, confidence) * (1.0 if parent < 0 else chances[parent]))
        return chances

    def score(self, request: Request) -> None:
        drafts, at = request.of(Drafts), -1
        draft, of_match = drafts.draft, self._of_match[bisect(MATCHES, drafts.draft.match)]
        for token in request.tokens(drafts.known, request.num_tokens):
            guesses = draft.children(at)
            if not guesses:
                return
            at = next((i for i in guesses if draft.tokens[i] == token), -1)
            of_match.note(hit=at == guesses[0], kept=KEPT)
            drafts.chance.note(hit=at == guesses[0], kept=KEPT_OF_REQUEST)
            if len(guesses) > 1 and at != guesses[0]:
                self._of_others.note(hit=at >= 0, kept=KEPT)
            if draft.confidences:
                for i in guesses:
                    self._class_of(request, draft.confidences[i])[1].note(hit=i == at, kept=KEPT)
            if at < 0:
                return

    def _trusted(self, request: Request, confidence: float) -> float:
        first, chance = self._class_of(request, confidence)
        return min(SURE, chance.value(first, TRUST))

    def _class_of(self, request: Request, confidence: float) -> tuple[float, Chance]:
        """Prior and record; samples have their own, since noise changes them."""
        kind = bisect(CONFIDENCES, confidence)
        return FIRST_OF_CONFIDENCE[kind], self._of_confidence[request.sampling.greedy][kind]


ENDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)  # largest row count of each range
SHARE = 0.05  # of a step, per added row: products bound by reading weights have room for more
DECAY_OF_RANGE, KEPT_OF_OTHERS = 0.8, 0.998  # decay per measurement of the same range, or of another
TRUST_OF_SHARE = 0.25  # prior weight of SHARE, in measurements


class RowCosts:
    """Cost of a decode step by rows, learned: a mean per range, interpolated.

    Costs bend: some kernels compute four rows as fast as one, and eight in twice the time. Old
    ranges drift to their neighbours, and are tried again as load changes.
    """

    def __init__(self) -> None:
        self._weights = [0.0] * len(ENDS)
        self._seconds = [0.0] * len(ENDS)
        self._table: Sequence[float] = [1 + SHARE * end for end in ENDS]
        self._is_old = False

    def note(self, rows: int, taken_s: float) -> None:
        at = _range_of(rows)
        for i in range(len(ENDS)):
            kept = DECAY_OF_RANGE if i == at else KEPT_OF_OTHERS
            self._weights[i] *= kept
            self._seconds[i] *= kept
        self._weights[at] += 1
        self._seconds[at] += taken_s * _ratio(rows, ENDS[at])
        self._is_old = True

    def step(self, rows: int) -> float:
        """Predict seconds, or any unit before measurements."""
        if self._is_old:
            self._table, self._is_old = self._estimates(), False
        at = _range_of(rows)
        if at == 0:
            return self._table[0]
        begin, end = ENDS[at - 1], ENDS[at]
        low, high = self._table[at - 1], self._table[at]
        return low + (high - low) * (rows - begin) / (end - begin)

    def _estimates(self) -> list[float]:
        known: list[float | None] = [None] * len(ENDS)
        for at in sorted(range(len(ENDS)), key=lambda i: -self._weights[i]):
            if (weight := self._weights[at]) > 0:
                guess = _between(known, at)
                trust = 0.0 if guess is None else TRUST_OF_SHARE
                known[at] = (self._seconds[at] + (guess or 0.0) * trust) / (weight + trust)
        table: list[float] = []
        for at, mean in enumerate(known):
            estimate = _between(known, at) if mean is None else mean
            assert estimate is not None, "something was measured"
            table.append(max(estimate, table[-1]) if table else estimate)  # noise: more rows never cost less
        return table


def _between(means: Sequence[float | None], at: int) -> float | None:
    known = [(end, mean) for end, mean in zip(ENDS, means, strict=True) if mean is not None]
    below, above = [k for k in known if k[0] < ENDS[at]], [k for k in known if k[0] > ENDS[at]]
    if below and above:
        (begin, low), (end, high) = below[-1], above[0]
        return low + (high - low) * (ENDS[at] - begin) / (end - begin)
    if not below and not above:
        return None
    if below:
        rows, mean = below[-1]
        return mean * _ratio(rows, ENDS[at])
    rows, mean = above[0]
    return mean * ENDS[at] / rows  # optimistic, so that fewer rows are tried, too


def _ratio(rows: int, others: int) -> float:
    return (1 + SHARE * others) / (1 + SHARE * rows)


def _range_of(rows: int) -> int:
    return min(bisect_left(ENDS, rows), len(ENDS) - 1)


LEAST = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # acceptance thresholds, tried in turn
MIN_GAIN = 0.1  # minimum gain in tokens per second: both estimates err
OVERLAP_GAIN = 0.1  # saving of overlap, which draft steps lack
ROWS_OF_TREES, TRUST_IN_ROWS = 1.5, 32.0  # rows that verify one pass's candidates; weight in passes
PASS_SHARE = 0.1  # of a step with as many rows: a drafter pass, before measurement
TRY_EVERY = 64  # steps without drafts until the drafter is tried again: chances and costs change


class Drafter(Protocol):
    def draft(self, request: Request) -> Draft:
        """Draft after the known tokens; called once per length."""


class Costs(Protocol):
    def step(self, rows: int) -> float:
        """Predict seconds."""

    def note(self, rows: int, taken_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Draft ranked by acceptance; `order` keeps parents first.

    `losses`: negative probabilities; `sums`: cumulative; `most`: limit per step.
    """

    request: Request
    draft: Draft
    order: Sequence[int] | None
    losses: Sequence[float]
    sums: Sequence[float]
    most: int

    def above(self, least: float) -> int:
        return max(0, min(self.most, bisect_right(self.losses, -least)))

    def first(self, count: int) -> Draft:
        return self.draft.first(count) if self.order is None else self.draft.part(self.order[:count])


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Draft step of the executor's drafter: `passes` by request, `topk` candidates per place."""

    passes: dict[str, int]
    topk: int = 1

    def places(self, passes: int) -> int:
        """Places that passes write, or one verified path."""
        return max(passes, (passes - 1) * self.topk)

    def passes_within(self, places: int, passes: int) -> int:
        return min(passes, places, 1 + places // self.topk) if places > 0 else 0


@dataclass(eq=False)
class Drafting:
    """Choice of drafts from `drafter`, grammars, and `passes` of the executor's drafter.

    `most`: draft tokens per request and step. `topk`: candidates per place, if trees beat chains.
    `counts`: penalties work for several rows of a request.
    """

    drafter: Drafter | None
    _: KW_ONLY
    most: int
    passes: int = 0
    topk: int = 1
    counts: bool = True
    costs: Costs = field(default_factory=RowCosts)
    pass_costs: Costs | None = None  # None before a measurement

    def __post_init__(self) -> None:
        self._chances = Chances()
        self._rows_a_pass = {width: Chance() for width in (1, self.topk)}
        self._steps_without = 0

    @property
    def for_all(self) -> bool:
        return self.drafter is not None or self.passes > 0

    def able(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests if self.for_all else [r for r in requests if r.grammar is not None]

    def ask(self, requests: Sequence[Request], *, rows: int, overlaps: bool, ahead: bool = False) -> DraftRequest:
        """Drafter passes for requests without drafts, for the most tokens per second.

        `ahead`: behind samples in flight, which use up a request's drafts.
        """
        bare = [r for r in requests if self._is_bare(r, ahead=ahead)] if self.passes else []
        if not bare:
            return DraftRequest({})
        count, topk = self._best_passes(bare, rows, overlaps=overlaps)
        self._steps_without = 0 if count else self._steps_without + 1
        if self._steps_without == TRY_EVERY:
            count, topk, self._steps_without = 1, 1, 0
        ask = DraftRequest({}, topk)
        return DraftRequest({r.rid: ask.passes_within(r.samples_left - 1, count) for r in bare} if count else {}, topk)

    def note_tokens(self, request: Request) -> None:
        """Learn from its newest tokens what became of the draft before them."""
        self._draft(request)

    def _is_bare(self, request: Request, *, ahead: bool) -> bool:
        drafts, known = request.of(Drafts), request.num_tokens
        if ahead and request.pending:
            known += request.pending - drafts.rows  # at least, when the passes begin
        elif self._draft(request).tokens:
            return False
        return self._can_draft(request) and drafts.asked_at < known and request.samples_left > 1

    def _best_passes(self, bare: Sequence[Request], rows: int, *, overlaps: bool) -> tuple[int, int]:
        best, best_rate = (0, 1), self._min_rate(rows, overlaps=overlaps)
        for topk, a_pass in self._rows_a_pass.items():
            chances = [self._chances.of_place(r.of(Drafts), topk) for r in bare]
            verified, pass_s = (
                a_pass.value(ROWS_OF_TREES if topk > 1 else 1.0, TRUST_IN_ROWS),
                self._pass(len(bare) * topk),
            )
            for count in range(1, self.passes + 1):
                tokens = rows + sum(_expected(chance, count) for chance in chances)
                drafts = min(self.most, round(count * verified)) * len(bare)
                rate = tokens / (self.costs.step(rows + drafts) + count * pass_s)
                if rate > best_rate:
                    best, best_rate = (count, topk), rate
        return best

    def _pass(self, rows: int) -> float:
        return PASS_SHARE * self.costs.step(rows) if self.pass_costs is None else self.pass_costs.step(rows)

    def _min_rate(self, rows: int, *, overlaps: bool) -> float:
        return (1 + MIN_GAIN + OVERLAP_GAIN * overlaps) * rows / self.costs.step(rows)

    def choose(self, requests: Sequence[Request], *, rows: int, overlaps: bool) -> dict[str, Draft]:
        """`rows`: without drafts. `overlaps`: another step follows."""
        found = [self._ranked(r, draft) for r in requests if (draft := self._draft(r)).tokens]
        best = dict[str, int]()
        if not found:
            return {}
        plain, best_rate = rows, self._min_rate(rows, overlaps=overlaps)
        for least in LEAST:
            rows, tokens, chosen = plain, float(plain), dict[str, int]()
            for one in found:
                if count := one.above(least):
                    chosen[one.request.rid] = count
                    rows += count
                    tokens += one.sums[count - 1]
            if (rate := tokens / self.costs.step(rows)) > best_rate:
                best, best_rate = chosen, rate
        for one in found:
            if one.draft.confidences and one.request.rid in best:
                self._note_rows(one.draft, best[one.request.rid])
        return {one.request.rid: one.first(best[one.request.rid]) for one in found if one.request.rid in best}

    def _ranked(self, request: Request, draft: Draft) -> _Ranked:
        chances, order = self._chances.of_tokens(request, draft), None
        if draft.parents:
            order = sorted(range(len(chances)), key=lambda i: -chances[i])
            chances = [chances[i] for i in order]
        most = min(request.samples_left - 1, self.most)
        return _Ranked(request, draft, order, [-chance for chance in chances], list(accumulate(chances)), most)

    def note(self, plan: Plan, taken_s: float) -> None:
        if plan.extend or not plan.items or taken_s <= 0:
            return
        if plan.rewinds and not plan.skips_model and not any(item.draft for item in plan.items):
            return  # rollbacks of an earlier step are no cost of these rows
        if not plan.skips_model:
            self.costs.note(len(plan.items), taken_s)
            return
        self.pass_costs = self.pass_costs or RowCosts()
        paths = plan.items[0].topk
        self.pass_costs.note(len(plan.items) * paths, taken_s / max(item.to_draft for item in plan.items))

    def _draft(self, request: Request) -> Draft:
        drafts = request.of(Drafts)
        if not self._can_draft(request):
            return NO_DRAFT
        if drafts.known < request.num_tokens:
            self._chances.score(request)
            drafts.draft, drafts.known = self._guess(request), request.num_tokens
        return drafts.draft

    def _can_draft(self, request: Request) -> bool:
        return self.counts or not request.sampling.penalized

    def _guess(self, request: Request) -> Draft:
        grammar = request.grammar
        if grammar is not None and (forced := grammar.forced()):
            return Draft(fitting(grammar, forced), FORCED)
        draft = NO_DRAFT if self.drafter is None else self.drafter.draft(request)
        return draft if grammar is None else Draft(fitting(grammar, draft.tokens), draft.match)

    def _note_rows(self, draft: Draft, rows: int) -> None:
        a_pass = self._rows_a_pass[len(draft.children(-1))]
        a_pass.hits += rows
        a_pass.tries += len(draft.first_path())


def fitting(grammar: Grammar, tokens: Sequence[int]) -> list[int]:
    """`tokens` before the first invalid one, or the grammar's end."""
    fork = grammar.fork() if tokens else grammar
    for i, token in enumerate(tokens):
        if not fork.accept(token) or fork.ended:
            return list(tokens[:i])
    return list(tokens)


def _expected(chance: float, count: int) -> float:
    return chance * (1 - chance**count) / (1 - chance)
