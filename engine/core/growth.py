"""How far present requests will grow together before enough of them have ended: learned from answers that have ended.

The length of a request with g tokens is predicted as the SHARE-quantile of recent answers longer than g.
Requests that end give their memory back, so what is needed is not the sum of all growth but its peak over time:

    by remaining tokens, longest first:   r1 >= r2 >= ... >= rn,  held now: c1, c2, ...
    when request i ends, 1..i are there:  sum(c1..ci) + i * ri        peak = the largest of these

The peak is that of the Past-Future scheduler (arXiv:2507.10150, LightLLM); a quantile stands for its random samples.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from engine.core.request import Request

WINDOW = 1000  # answers remembered
FEWEST = 32  # before so many have ended nothing is known
# Many are there at once, so their sum is near its mean: less than half is enough (docs/design/scheduling.md).
SHARE = 0.35


class MeasuredGrowth:
    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def note_end(self, num_tokens: int) -> None:
        """An answer has ended by itself or by its limit, after `num_tokens`."""
        if len(self._recent) == WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    @property
    def known(self) -> bool:
        return len(self._recent) >= FEWEST

    def remaining(self, request: Request) -> int:
        """Tokens that `request` will still sample; one longer than all that were seen goes to its limit."""
        known = len(request.output_ids)
        limit = max(0, request.max_new_tokens - known)
        longer = bisect_right(self._sorted, known)
        if longer == len(self._sorted):
            return limit
        at = longer + int(SHARE * (len(self._sorted) - longer))
        return min(limit, self._sorted[min(at, len(self._sorted) - 1)] - known)

    def peak_tokens(self, requests: Iterable[Request], *, floor: int) -> int:
        """Tokens beyond those held now that `requests` will need at once; each grows by `floor` at least, if it may."""
        grown = sorted(((self._growth(r, floor), r.num_tokens) for r in requests), reverse=True)
        held, peak = 0, 0
        for i, (growth, tokens) in enumerate(grown, 1):
            held += tokens
            peak = max(peak, held + i * growth)
        return max(0, peak - held)

    def _growth(self, request: Request, floor: int) -> int:
        return max(self.remaining(request), min(floor, request.max_new_tokens - len(request.output_ids)))
