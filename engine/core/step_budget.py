"""Prompt tokens that a step may have to end in time, learned from durations.

*Work*: a token is one unit, plus one per `attention_tokens` tokens before it; encoding an image
counts as its tokens. The next step may have

  work = allowed seconds / rate,   rate = seconds of the last steps / their work

Allowed are `max_step_s`, or three one-page steps, lest chunks shrink to a page. Rates come from
steps with half of the allowed work and from too long ones; lower medians of three ignore one slow
step. Work grows threefold at most.
"""

import math
from collections import deque
from collections.abc import Sequence

from engine.core.plan import Plan

NUM_LAST = 3
INFORMATIVE_SHARE = 0.5
GROWTH = 3.0  # per step; double would often be rounded down to pages, and stay
WORTH = 3.0  # times a one-page step: less would often shrink to one page again
SMALL_EVERY = 16  # period of one-page steps, if these decide
ROUNDING_TOKENS = 1e-6


class StepBudget:
    """`first_rate`: initial seconds per unit. All arguments are positive."""

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
