"""Cost of a decode step by rows, learned: a mean per range, interpolated.

Costs bend: some kernels compute four rows as fast as one, and eight in twice the time. Old ranges
drift to their neighbours, and are tried again as load changes.
"""

from bisect import bisect_left
from collections.abc import Sequence

ENDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)  # largest row count of each range
SHARE = 0.05  # of a step, per added row: products bound by reading weights have room for more
KEPT, KEPT_OF_OTHERS = 0.8, 0.998  # decay per measurement of the same range, or of another
TRUST = 0.25  # prior weight of SHARE, in measurements


class RowCosts:
    def __init__(self) -> None:
        self._weights = [0.0] * len(ENDS)
        self._seconds = [0.0] * len(ENDS)
        self._table: Sequence[float] = [1 + SHARE * end for end in ENDS]
        self._is_old = False

    def note(self, rows: int, taken_s: float) -> None:
        at = _range_of(rows)
        for i in range(len(ENDS)):
            kept = KEPT if i == at else KEPT_OF_OTHERS
            self._weights[i] *= kept
            self._seconds[i] *= kept
        self._weights[at] += 1
        self._seconds[at] += taken_s * _ratio(rows, ENDS[at])
        self._is_old = True

    def step(self, rows: int) -> float:
        """Predict a step's time, in any unit before measurements."""
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
                trust = 0.0 if guess is None else TRUST
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
