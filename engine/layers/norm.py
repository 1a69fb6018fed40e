"""RMSNorm. Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"."""

import torch
from torch.nn import functional

from engine.kernels.elementwise import elementwise_for, elementwise_on_cpu


class RMSNorm:
    """x / sqrt(mean(x**2) + eps) * weight over the last dim of x [T, D], computed in fp32; weight [D]."""

    def __init__(self, weight: torch.Tensor, *, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._kernel = elementwise_for(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self.weight, eps=self.eps)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The norm of x + delta, which x becomes."""
        if delta is None:
            return self(x)
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self.weight, eps=self.eps, delta=delta)
        return self(x.add_(delta))


def add(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """x + delta, which x becomes: rounded as `RMSNorm.of_sum` rounds it."""
    kernel = elementwise_on_cpu(x)
    return x.add_(delta) if kernel is None else kernel.add(x, delta)
