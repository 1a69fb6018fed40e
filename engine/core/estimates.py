"""Estimates of the scheduler: output lengths, pages for decode, durations of steps."""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.core.plan import Plan
from engine.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRule:
    """Expected share of max_new_tokens that running requests use, by SGLang's formulas.

    start    initial * conservativeness
    decay    linear, to floor_share of the start in decay_steps that decode
    retract  (generated so far + headroom_tokens each) / (sum of max_new_tokens), over the rest
    clip     added tokens per request are capped at `clip_tokens`
    """

    initial: float = 0.7
    conservativeness: float = 1.0
    floor_share: float = 0.14
    decay_steps: int = 600
    headroom_tokens: int = 20
    clip_tokens: int = 4096


class NewTokenRatio:
    def __init__(self, rule: RatioRule = RatioRule()) -> None:
        assert rule.conservativeness >= 0
        self._rule = rule
        self._initial = min(rule.initial * rule.conservativeness, 1.0)
        self._floor = self._initial * rule.floor_share
        self._step = (self._initial - self._floor) / rule.decay_steps
        self.value = self._initial

    def decay(self, share: float) -> None:
        self.value = max(self.value - self._step * share, self._floor)

    def on_retraction(self, staying: Iterable[Request]) -> None:
        requests = list(staying)
        generated = sum(len(r.output_ids) for r in requests) + self._rule.headroom_tokens * len(requests)
        allowed = sum(r.max_new_tokens for r in requests) + 1
        self.value = min(generated / allowed, 1.0)

    def reset(self) -> None:
        self.value = self._initial

    def growth_tokens(self, request: Request) -> float:
        return self.new_growth(request) * self.value

    def new_growth(self, request: Request) -> int:
        """Clipped maximum of added tokens, the estimate for a new request."""
        return min(request.tokens_left, self._rule.clip_tokens)


WINDOW = 1000  # answers remembered
FEWEST = 32  # finished answers before a prediction
# The sum of many is near its mean: less than half suffices (docs/design/scheduling.md).
SHARE = 0.35


class OutputLengthEstimator:
    """Prediction of the added tokens of present requests, from finished answers.

    A request with g tokens is predicted to reach the SHARE-quantile of recent answers longer than
    g. Finished requests free memory, so the need is a peak over time:

       by remaining tokens, longest first:   r1 >= r2 >= ... >= rn,  held now: c1, c2, ...
       when request i ends, 1..i are there:  sum(c1..ci) + i * ri        peak = the largest of these

    After the Past-Future scheduler (arXiv:2507.10150, LightLLM).
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def note_end(self, num_tokens: int) -> None:
        """Record an unaborted answer."""
        if len(self._recent) == WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    @property
    def known(self) -> bool:
        return len(self._recent) >= FEWEST

    def remaining(self, request: Request) -> int:
        """Predict remaining tokens, or the limit for the longest answer so far."""
        known, limit = len(request.output_ids), request.tokens_left
        longer = bisect_right(self._sorted, known)
        if longer == len(self._sorted):
            return limit
        at = longer + int(SHARE * (len(self._sorted) - longer))
        return min(limit, self._sorted[min(at, len(self._sorted) - 1)] - known)

    def peak_tokens(self, requests: Iterable[Request], *, floor: int) -> int:
        """Predict the peak of added tokens, at least `floor` per request, within its limit."""
        grown = [(max(self.remaining(r), min(floor, r.tokens_left)), r.num_tokens) for r in requests]
        held, peak = 0, 0
        for i, (growth, tokens) in enumerate(sorted(grown, reverse=True), 1):
            held += tokens
            peak = max(peak, held + i * growth)
        return max(0, peak - held)


NUM_LAST = 3
INFORMATIVE_SHARE = 0.5
GROWTH = 3.0  # per step; double would often be rounded down to pages, and stay
WORTH = 3.0  # times a one-page step: less would often shrink to one page again
SMALL_EVERY = 16  # period of one-page steps, if these decide
ROUNDING_TOKENS = 1e-6


class StepBudget:
    """Prompt tokens that a step may have to end in time, learned from durations.

    *Work*: a token is one unit, plus one per `attention_tokens` tokens before it, and per token of
    an encoded image. `first_rate`: initial seconds per unit. The next step may have

      work = allowed seconds / rate,   rate = seconds of the last steps / their work

    Allowed are `max_step_s`, or three one-page steps, lest chunks shrink to a page. Rates are lower
    medians of three steps, with half of the allowed work or too long. Work grows threefold at most.
    """

    def __init__(self, *, max_step_s: float, page_size: int, attention_tokens: float, first_rate: float) -> None:
        assert max_step_s > 0 and attention_tokens > 0 and first_rate > 0
        self._max_step_s = max_step_s
        self._page_size = page_size
        self._attention_tokens = attention_tokens
        self._rate = first_rate
        self._rates: deque[float] = deque(maxlen=NUM_LAST)
        self._small_s: deque[float] = deque(maxlen=NUM_LAST)
        self._since_small = 0
        self._usual = self.work = max(float(page_size), max_step_s / first_rate)

    def work_of(self, start: int, num_tokens: int) -> float:
        return num_tokens * (1.0 + (start + num_tokens / 2) / self._attention_tokens)

    def tokens(self, work: float, start: int) -> int:
        per_token = 1.0 + start / self._attention_tokens
        work = max(work, 0.0)
        roots = per_token + math.sqrt(per_token**2 + 2 * work / self._attention_tokens)
        return int(2 * work / roots + ROUNDING_TOKENS)

    def note(self, plan: Plan, taken_s: float) -> None:
        if not plan.extend or taken_s <= 0:
            return
        encoded = sum(image.num_tokens for image in plan.encodes)
        work = sum(self.work_of(item.start, item.q_len) for item in plan.items) + encoded
        self._note_small(sum(item.q_len for item in plan.items) + encoded, taken_s)
        if work >= INFORMATIVE_SHARE * self._usual or taken_s > self._allowed_s:
            self._rates.append(taken_s / work)
            self._rate = _lower_median(self._rates)
        wanted = max(float(self._page_size), self._allowed_s / self._rate)
        self._usual = min(wanted, max(self._usual, GROWTH * work))
        small_is_due = self._allowed_s > self._max_step_s and self._since_small >= SMALL_EVERY
        self.work = float(self._page_size) if small_is_due else self._usual

    def _note_small(self, num_tokens: int, taken_s: float) -> None:
        """Learn from a one-page step; a faster larger one counts, too."""
        is_small = num_tokens <= self._page_size
        self._since_small = 0 if is_small else self._since_small + 1
        if is_small or (self._small_s and taken_s < _lower_median(self._small_s)):
            self._small_s.append(taken_s)

    @property
    def _allowed_s(self) -> float:
        page_s = _lower_median(self._small_s) if self._small_s else 0.0
        return self._max_step_s if page_s <= self._max_step_s else WORTH * page_s


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


class DecodeReserve:
    """Pages that decode keeps free when admitting a request: four rules over present and new ones.

    predicted tokens    joint need, by finished answers, or the new-token ratio at first
    reserved tokens     minimum per request (--num-reserved-decode-tokens), within limits
    the largest single  the request that may add most can finish
    the worst case      at most all limits together
    """

    def __init__(
        self, *, floor: int, ratio: NewTokenRatio, growth: OutputLengthEstimator, pages_for: Callable[[int], int]
    ) -> None:
        self._floor = floor
        self._ratio = ratio
        self._growth = growth
        self._pages_for = pages_for

    def pages(self, coming: list[Request]) -> int:
        """Pages to keep free for tokens that `coming` will add."""
        pages_for = self._pages_for  # a request's last page may have room
        to_finish = [pages_for(r.num_tokens + r.tokens_left) - pages_for(r.num_tokens) for r in coming]
        expected = pages_for(int(self._expected_tokens(coming)))
        return max(min(expected, sum(to_finish)), max(to_finish))

    def _expected_tokens(self, coming: list[Request]) -> float:
        if self._growth.known:
            return self._growth.peak_tokens(coming, floor=self._floor)
        return sum(max(self._ratio.growth_tokens(r), min(r.tokens_left, self._floor)) for r in coming)
