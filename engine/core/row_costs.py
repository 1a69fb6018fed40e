"""What a decode step costs by its rows, learned while serving: a mean for each range of rows, and a line between two of them.

Costs bend: some kernels compute four rows as fast as one, and eight in twice the time. A range that was not measured lately comes to be
what the ranges around it say, so that it is tried again: contexts grow, and other work comes and goes.
"""

from bisect import bisect_left
from collections.abc import Sequence

ENDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)  # the last number of rows of each range
SHARE = 0.05  # of a step, that a row adds: a product that reads weights from memory has room for more rows
KEPT, KEPT_OF_OTHERS = 0.8, 0.998  # weight of a measurement when the next one of its range, or of another one, is there
TRUST = 0.25  # measurements that weigh as much as SHARE


class RowCosts:
    def __init__(self) -> None:
        self._weights = [0.0] * len(ENDS)
        self._seconds = [0.0] * len(ENDS)
        self._table: Sequence[float] = [1 + SHARE * end for end in ENDS]
        self._is_old = False

    def note(self, rows: int, taken_s: float) -> None:
        """Learn from a decode step."""
        at = _range_of(rows)
        for i in range(len(ENDS)):
            kept = KEPT if i == at else KEPT_OF_OTHERS
            self._weights[i] *= kept
            self._seconds[i] *= kept
        self._weights[at] += 1
        self._seconds[at] += taken_s * _ratio(rows, ENDS[at])
        self._is_old = True

    def step(self, rows: int) -> float:
        """Predict what a step of `rows` rows takes: in seconds, or before any was measured in any unit."""
        if self._is_old:
            self._table, self._is_old = self._estimates(), False
        at = _range_of(rows)
        if at == 0:
            return self._table[0]
        begin, end = ENDS[at - 1], ENDS[at]
        low, high = self._table[at - 1], self._table[at]
        return low + (high - low) * (rows - begin) / (end - begin)

    def _estimates(self) -> list[float]:
        """The best known range is taken as it is, the next one beside what that says of it, and so on."""
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
    """Estimate range `at` from the ranges around it; None: none was measured."""
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
    return mean * ENDS[at] / rows  # as cheap as may be, so that fewer rows are tried, too


def _ratio(rows: int, others: int) -> float:
    """Estimate the cost of `others` rows as a multiple of `rows` rows, without a measurement."""
    return (1 + SHARE * others) / (1 + SHARE * rows)


def _range_of(rows: int) -> int:
    return min(bisect_left(ENDS, rows), len(ENDS) - 1)
