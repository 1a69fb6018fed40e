"""Prediction of the added tokens of present requests, from finished answers.

A request with g tokens is predicted to reach the SHARE-quantile of recent answers longer than g.
Finished requests free memory, so the need is a peak over time:

    by remaining tokens, longest first:   r1 >= r2 >= ... >= rn,  held now: c1, c2, ...
    when request i ends, 1..i are there:  sum(c1..ci) + i * ri        peak = the largest of these

After the Past-Future scheduler (arXiv:2507.10150, LightLLM).
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from engine.core.request import Request

WINDOW = 1000  # answers remembered
FEWEST = 32  # finished answers before a prediction
# The sum of many is near its mean: less than half suffices (docs/design/scheduling.md).
SHARE = 0.35


class MeasuredGrowth:
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
        """Predict the peak of added tokens, each request with at least `floor`, within its limit."""
        grown = [(max(self.remaining(r), min(floor, r.tokens_left)), r.num_tokens) for r in requests]
        held, peak = 0, 0
        for i, (growth, tokens) in enumerate(sorted(grown, reverse=True), 1):
            held += tokens
            peak = max(peak, held + i * growth)
        return max(0, peak - held)
