"""Where a request is computed and answered: candidates and their price in seconds. Pure.

    route    pair, or whole at a decode, prefill or unified worker; also with pages fetched
    price    queue + compute + transfer + answer + delay of others + LATE * time beyond objectives

Ideas: Splitwise (ISCA'24), Mooncake (FAST'25), TaiChi (arXiv 2508.01989).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LATE = 0.25  # additional weight of seconds beyond an objective
ANSWER_WEIGHT = 0.2  # of a second of an answer beside one before a first token, without objectives
MAX_ANSWER_WEIGHT = 4.0  # with objectives that leave TTFT much slack
STAY = 0.03  # least relative saving for which prompts of one size change their route
FETCH_BASE_S = 0.002  # two messages between workers
MAX_SPREADS = 6.0  # below an objective nothing is late
DEFAULT_BYTES_S = 1e9  # of transfers, before a worker reports its rate


class FittedLine(NamedTuple):
    """`spread_s`: standard deviation of measurements around it."""

    base_s: float
    slope_s: float
    spread_s: float = 0.0

    def at(self, x: float) -> float:
        return self.base_s + self.slope_s * x

    def scaled(self, by: float) -> "FittedLine":
        return FittedLine(by * self.base_s, by * self.slope_s, by * self.spread_s)


class Figures(NamedTuple):
    """Load and measured times of a worker; 0 if unknown.

    `ttft`: of whole requests, by tokens. `handover`: what pairs take longer. `step`: ITL by
    `answers` while no prompt is computed. `paused`: share of an answer's time that prompts take.
    `is_guessed`: not measured, so objectives do not count.
    """

    ttft: FittedLine
    step: FittedLine
    waiting_tokens: int = 0
    answers: int = 0
    held_tokens: float = 0.0
    capacity_tokens: int = 0
    max_answers: int = 0
    handover: FittedLine = FittedLine(0.0, 0.0)
    paused: float = 0.0
    is_guessed: bool = False

    @property
    def slowdown(self) -> float:
        """Factor of steps and pauses: more prompts come while answers wait."""
        return 1 / (1 - self.paused)

    def itl_s(self, answers: int) -> float:
        return self.step.at(answers) * self.slowdown


class Ask(NamedTuple):
    """A request and its objectives (inf: none)."""

    prompt_tokens: int
    answer_tokens: float
    ttft_s: float = math.inf
    itl_s: float = math.inf


class PageSource(NamedTuple):
    """Pages to fetch: the first `tokens`, of which the computing worker lacks `missing`.

    `from_store`: it does so by itself.
    """

    worker_id: int
    tokens: int
    missing: int
    seconds: float
    from_store: bool = False


def fetch_s(size_bytes: float, bytes_s: float) -> float:
    return FETCH_BASE_S + size_bytes / (bytes_s or DEFAULT_BYTES_S)


class Candidate(NamedTuple):
    """`workers`: ids, the computing one first. `cached`: tokens of the prompt there."""

    route: str
    workers: tuple[int, ...]
    cached: int = 0
    held: int = 0  # by the answering worker
    source: PageSource | None = None


class Price(NamedTuple):
    """`others_s`: delays of other requests."""

    queue_s: float
    compute_s: float
    transfer_s: float
    itl_s: float
    others_s: float
    late_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s + self.transfer_s + self.itl_s + self.others_s + self.late_s


class Decision(NamedTuple):
    """`runner_up`: the cheapest of another route; None if there is none."""

    chosen: Candidate
    price: Price
    runner_up: Candidate | None = None
    runner_up_s: float = 0.0


def price(candidate: Candidate, ask: Ask, figures: Mapping[int, Figures]) -> Price:
    """`figures`: by worker."""
    first, last, source = figures[candidate.workers[0]], figures[candidate.workers[-1]], candidate.source
    new_tokens = max(1, ask.prompt_tokens - candidate.cached - (0 if source is None else source.missing))
    queue_s = first.ttft.slope_s * first.waiting_tokens + wait_for_room_s(last, ask)
    compute_s, stall_s = first.ttft.at(new_tokens), first.ttft.slope_s * first.slowdown * new_tokens
    transfer_s = first.handover.at(ask.prompt_tokens - candidate.held) if len(candidate.workers) > 1 else 0.0
    if source is not None:
        # a request and its reply, or a store's lookup and read, each wait for a step
        steps_s = 2 * first.itl_s(first.answers) if first.answers else 0.0
        transfer_s += source.seconds + steps_s
    step_s = last.itl_s(last.answers + 1)
    others_s = first.answers * stall_s + last.answers * last.step.slope_s * last.slowdown * ask.answer_tokens
    late_s = 0.0
    if not first.is_guessed and not last.is_guessed:
        late_s = excess_s(queue_s + compute_s + transfer_s - ask.ttft_s, first.ttft.spread_s)
        late_s += _late_answers_s(first, last, ask, stall_s, is_pair=len(candidate.workers) > 1)
    weight = _answer_weight(ask)
    itl_s = weight * step_s * ask.answer_tokens
    return Price(queue_s, compute_s, transfer_s, itl_s, weight * others_s, LATE * late_s)


def _late_answers_s(first: Figures, last: Figures, ask: Ask, stall_s: float, *, is_pair: bool) -> float:
    """Lateness of its answer, and what it adds to that of others."""
    if ask.itl_s == math.inf:
        return 0.0
    pause_s = stall_s / max(1.0, ask.answer_tokens)  # of an answer beside the prompt, by tokens
    own_s = _late_token_s(last, ask, 1)
    others_s = last.answers * (_late_token_s(last, ask, 1, 0.0 if is_pair else pause_s) - _late_token_s(last, ask))
    if is_pair:
        others_s += first.answers * (_late_token_s(first, ask, 0, pause_s) - _late_token_s(first, ask))
    return ask.answer_tokens * (own_s + others_s)


def _late_token_s(worker: Figures, ask: Ask, more: int = 0, pause_s: float = 0.0) -> float:
    spread_s = worker.step.spread_s * worker.slowdown
    return excess_s(worker.itl_s(worker.answers + more) + pause_s - ask.itl_s, spread_s)


def excess_s(mean_s: float, spread_s: float) -> float:
    """The mean of what is above 0 of a normal distribution."""
    if spread_s <= 0.0 or mean_s < -MAX_SPREADS * spread_s:
        return max(0.0, mean_s)
    z = mean_s / spread_s
    return 0.5 * mean_s * (1 + math.erf(z / math.sqrt(2))) + spread_s * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _answer_weight(ask: Ask) -> float:
    """By the slack that the objectives leave."""
    if ask.ttft_s == math.inf or ask.itl_s == math.inf:
        return ANSWER_WEIGHT
    return min(MAX_ANSWER_WEIGHT, ANSWER_WEIGHT * ask.ttft_s / (max(1.0, ask.answer_tokens) * ask.itl_s))


def wait_for_room_s(worker: Figures, ask: Ask) -> float:
    """The time until there is memory and a batch slot.

    A share of either frees up in that share of a request's stay.
    """
    over = 0.0
    if worker.capacity_tokens:
        over = (worker.held_tokens + ask.prompt_tokens + ask.answer_tokens) / worker.capacity_tokens - 1
    if worker.max_answers:
        over = max(over, (worker.answers + 1) / worker.max_answers - 1)
    return max(0.0, over) * ask.answer_tokens * worker.itl_s(worker.answers)


def decide(
    candidates: Sequence[Candidate],
    ask: Ask,
    figures: Mapping[int, Figures],
    *,
    last: str | None = None,
    tries: Sequence[Candidate] = (),
) -> Decision:
    """The cheapest candidate, of the `last` route if that is little dearer, one of `tries` (without
    fresh measurements) before all.
    """
    prices = [price(one, ask, figures) for one in candidates]
    totals = [one.total_s for one in prices]
    order = sorted(range(len(candidates)), key=totals.__getitem__)
    best = order[0]
    if tries:
        best = min((candidates.index(one) for one in tries), key=totals.__getitem__)
    else:
        old = next((at for at in order if candidates[at].route == last), best)
        best = old if totals[best] >= (1 - STAY) * totals[old] else best
    other = next((at for at in order if candidates[at].route != candidates[best].route), None)
    if other is None:
        return Decision(candidates[best], prices[best])
    return Decision(candidates[best], prices[best], candidates[other], totals[other])
