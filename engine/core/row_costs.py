"""What a decode step costs by its rows, learned while serving: seconds = base + rows * each.

A line through the last steps, old ones count less and less: contexts grow, other work comes and goes. Until rows have varied, a row
is taken to add `FIRST_SHARE` of a step.
"""

FIRST_SHARE = 0.05  # a product that reads weights from memory has room for more rows
KEPT = 0.98  # weight of a step when the next one has been measured: some 50 count
TRUST = 1.0  # rows**2 of variation that weigh as much as FIRST_SHARE


class RowCosts:
    def __init__(self) -> None:
        self._weight = self._rows = self._rows2 = self._seconds = self._products = 0.0

    def note(self, rows: int, taken_s: float) -> None:
        """Learn from a decode step."""
        self._weight = self._weight * KEPT + 1
        self._rows = self._rows * KEPT + rows
        self._rows2 = self._rows2 * KEPT + rows * rows
        self._seconds = self._seconds * KEPT + taken_s
        self._products = self._products * KEPT + rows * taken_s

    def step(self, rows: int) -> float:
        """Predict what a step of `rows` rows takes: in seconds, or before any was measured in any unit."""
        if self._seconds <= 0:
            return 1.0 + FIRST_SHARE * rows
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        return max(mean_s + self._slope(mean_rows, mean_s) * (rows - mean_rows), mean_s / (1 + mean_rows))

    def _slope(self, mean_rows: float, mean_s: float) -> float:
        variance = max(0.0, self._rows2 / self._weight - mean_rows**2)
        covariance = self._products / self._weight - mean_rows * mean_s
        slope = (covariance + TRUST * FIRST_SHARE * mean_s) / (variance + TRUST)
        return min(max(slope, 0.0), mean_s / mean_rows)
