"""A straight line through measurements, recent ones counting most. Pure.

Recursive least squares of y = a + b * x with exponential forgetting: weighted means and co-moments, updated by each point
(West 1979, "Updating mean and variance estimates"). a and b are never negative: a longer queue never shortens a wait.
Without spread in x there is no slope, and the mean stands for all.
"""

from dataclasses import dataclass

KEEP = 0.98  # weight of a point relative to the next one: about 50 of them count
MIN_POINTS = 8  # before which nothing is predicted


@dataclass(slots=True)
class LineFit:
    num_points: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.num_points += 1
        self._weight = self._weight * KEEP + 1.0
        dx, dy, share = x - self._x, y - self._y, 1.0 / self._weight
        self._x += share * dx
        self._y += share * dy
        self._xx = KEEP * self._xx + dx * (x - self._x)
        self._xy = KEEP * self._xy + dx * (y - self._y)

    @property
    def slope(self) -> float:
        return max(0.0, self._xy / self._xx) if self._xx > 1e-9 else 0.0

    @property
    def intercept(self) -> float:
        return max(0.0, self._y - self.slope * self._x)

    @property
    def is_known(self) -> bool:
        """Whether there are enough points to predict anything."""
        return self.num_points >= MIN_POINTS

    def at(self, x: float) -> float | None:
        """Predict y; None while too little is known."""
        return self.intercept + self.slope * x if self.is_known else None
