"""RMSNorm. Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"."""

import torch
from torch.nn import functional

from engine.kernels.elementwise import elementwise_for


class RMSNorm:
    """x / sqrt(mean(x**2) + eps) * weight over the last dim of x [T, D], in fp32 whatever the dtype of x; weight [D]."""

    def __init__(self, weight: torch.Tensor, *, eps: float) -> None:
        self._weight = weight
        self._shape = weight.shape
        self._eps = eps
        self._kernel = elementwise_for(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self._weight, eps=self._eps)
        return functional.rms_norm(x, self._shape, self._weight, self._eps)

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """The norm of x + delta, which x becomes (a residual stream that goes on)."""
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self._weight, eps=self._eps, delta=delta)
        return self(x.add_(delta))
