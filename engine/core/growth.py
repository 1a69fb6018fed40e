"""How far present requests will grow together before enough of them have ended: learned from answers that have ended.

The length of a request with g tokens is predicted as the SHARE-quantile of recent answers longer than g.
Requests that end give their memory back, so the need is the peak of all growth over time, below its sum:

    by remaining tokens, longest first:   r1 >= r2 >= ... >= rn,  held now: c1, c2, ...
    when request i ends, 1..i are there:  sum(c1..ci) + i * ri        peak = the largest of these

The peak is that of the Past-Future scheduler (arXiv:2507.10150, LightLLM); a quantile stands for its random samples.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from engine.core.request import Request

WINDOW = 1000  # answers remembered
FEWEST = 32  # answers that must have ended before a prediction
# Many are there at once, so their sum is near its mean: less than half is enough (docs/design/scheduling.md).
SHARE = 0.35


class MeasuredGrowth:
    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def note_end(self, num_tokens: int) -> None:
        """Learn from an answer that ended, not aborted, after `num_tokens`."""
        if len(self._recent) == WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    @property
    def known(self) -> bool:
        return len(self._recent) >= FEWEST

    def remaining(self, request: Request) -> int:
        """Predict the tokens that `request` will still sample; its limit if it is longer than all before."""
        known, limit = len(request.output_ids), request.tokens_left
        longer = bisect_right(self._sorted, known)
        if longer == len(self._sorted):
            return limit
        at = longer + int(SHARE * (len(self._sorted) - longer))
        return min(limit, self._sorted[min(at, len(self._sorted) - 1)] - known)

    def peak_tokens(self, requests: Iterable[Request], *, floor: int) -> int:
        """Predict the most tokens beyond those held now; each request grows by `floor` at least, within its limit."""
        grown = [(max(self.remaining(r), min(floor, r.tokens_left)), r.num_tokens) for r in requests]
        held, peak = 0, 0
        for i, (growth, tokens) in enumerate(sorted(grown, reverse=True), 1):
            held += tokens
            peak = max(peak, held + i * growth)
        return max(0, peak - held)
