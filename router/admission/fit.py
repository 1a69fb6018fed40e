"""A straight line through what was measured, the latest counting most. Pure.

Recursive least squares of y = a + b * x with exponential forgetting: weighted means and co-moments, brought up to date by
each point (West 1979, "Updating mean and variance estimates"). a and b are never negative: no wait gets shorter
because more is ahead of it. Without spread in x there is no slope to be known, and the mean stands for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

KEEP = 0.98  # weight of a point after each newer one: some 50 of them count
STATE = 6  # numbers that it is made of
MIN_POINTS = 8  # before which nothing is said


@dataclass(slots=True)
class Fit:
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
    def state(self) -> tuple[float, ...]:
        """`STATE` numbers that say it all."""
        return (self.num_points, self._weight, self._x, self._y, self._xx, self._xy)

    @classmethod
    def of(cls, state: Sequence[float]) -> "Fit":
        """From its `state`."""
        return cls(int(state[0]), *state[1:])

    def joined(self, other: "Fit") -> "Fit":
        """Of the points of both: co-moments about the common mean (Chan, Golub, LeVeque 1983)."""
        if not other._weight:
            return self
        if not self._weight:
            return other
        weight = self._weight + other._weight
        share, dx, dy = other._weight / weight, other._x - self._x, other._y - self._y
        between = self._weight * share
        return Fit(
            self.num_points + other.num_points,
            weight,
            self._x + share * dx,
            self._y + share * dy,
            self._xx + other._xx + dx * dx * between,
            self._xy + other._xy + dx * dy * between,
        )

    @property
    def slope(self) -> float:
        return max(0.0, self._xy / self._xx) if self._xx > 1e-9 else 0.0

    @property
    def intercept(self) -> float:
        return max(0.0, self._y - self.slope * self._x)

    @property
    def is_known(self) -> bool:
        """Whether there are points enough to say anything."""
        return self.num_points >= MIN_POINTS

    def at(self, x: float) -> float | None:
        """y there; None while too little is known."""
        return self.intercept + self.slope * x if self.is_known else None
