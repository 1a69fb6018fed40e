"""A mean that forgets. Pure."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Smooth:
    """Exponential mean of samples that stand for times of any length."""

    window_s: float
    value: float | None = None

    def add(self, sample: float, dt_s: float) -> None:
        weight = 1.0 if self.value is None else -math.expm1(-dt_s / self.window_s)
        self.value = sample if self.value is None else self.value + weight * (sample - self.value)

    @property
    def known(self) -> float:
        return 0.0 if self.value is None else self.value
