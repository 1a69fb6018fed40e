"""RMSNorm. Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"."""

import torch
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x**2) + eps) * weight over the last dim, computed in fp32 whatever the dtype of x.

    `weight`: [D], or [H, D] to give each of H heads its own (x is [..., H, D] then).
    """

    def __init__(self, weight: torch.Tensor, *, eps: float) -> None:
        self._weight = weight
        self._shape = weight.shape[-1:]
        self._per_head = weight.dim() > 1
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._per_head:
            return functional.rms_norm(x, self._shape, None, self._eps).mul_(self._weight)
        return functional.rms_norm(x, self._shape, self._weight, self._eps)
