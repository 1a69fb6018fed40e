"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

import torch
from torch.nn import functional

from engine.kernels.elementwise import elementwise_for, elementwise_on_cpu
from engine.parallel.collectives import Collectives


class RMSNorm:
    """x / sqrt(mean(x**2) + eps) * weight over the last dim of x [T, D], in fp32."""

    def __init__(self, weight: torch.Tensor, *, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._kernel = elementwise_for(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self.weight, eps=self.eps)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add `delta` to x in place; return the norm."""
        if delta is None:
            return self(x)
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self.weight, eps=self.eps, delta=delta)
        return self(x.add_(delta))


class OffsetNorm:
    """RMSNorm times weight + offset (Gemma), in fp32 for any weight dtype."""

    def __init__(self, weight: torch.Tensor, *, eps: float, offset: float) -> None:
        self._weight = weight
        self._eps = eps
        self._offset = offset
        self._kernel = elementwise_on_cpu(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self._weight, eps=self._eps, offset=self._offset)
        weight = self._weight.float() + self._offset
        return functional.rms_norm(x.float(), weight.shape, weight, self._eps).to(x.dtype)

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        if delta is not None and self._kernel is not None:
            return self._kernel.rms_norm(x, self._weight, eps=self._eps, delta=delta, offset=self._offset)
        return self(x if delta is None else x.add_(delta))


class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, in fp32, by default 1 and 0."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, *, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps)

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        return self(x if delta is None else add(x, delta))


class Scaled:
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kernel = elementwise_on_cpu(x)
        return x.mul_(self._factor) if kernel is None else kernel.scale(x, self._factor)


class NoNorm:
    """The identity."""

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add `delta` to x in place; the caller must not write the result."""
        return x if delta is None else add(x, delta)


Norm = RMSNorm | OffsetNorm | LayerNorm
Normed = Norm | NoNorm


def rms_norm(weight: torch.Tensor, *, eps: float, offset: float) -> RMSNorm | OffsetNorm:
    return OffsetNorm(weight, eps=eps, offset=offset) if offset else RMSNorm(weight, eps=eps)


class WholeNorm:
    """RMS norms of q and k over all heads, before RoPE (OLMo 2).

    `weights`: [own heads * head_dim] each. `copies`: ranks with the same k heads.
    """

    def __init__(
        self,
        weights: tuple[torch.Tensor, torch.Tensor],
        *,
        sizes: tuple[int, int],
        eps: float,
        collectives: Collectives,
        copies: int,
    ) -> None:
        self._weights = weights
        self._sizes = sizes
        self._eps = eps
        self._collectives = collectives
        self._copies = copies

    def __call__(self, qkv: torch.Tensor) -> None:
        q, k = (len(weight) for weight in self._weights)
        parts = qkv[:, :q], qkv[:, q : q + k]
        squares = torch.stack([part.float().square().sum(-1) for part in parts], 1)
        squares[:, 1] /= self._copies
        squares = self._collectives.sum(squares, dtype=torch.float32)
        for i, (part, weight) in enumerate(zip(parts, self._weights, strict=True)):
            scale = torch.rsqrt(squares[:, i : i + 1] / self._sizes[i] + self._eps)
            part.copy_(part.float() * scale * weight)


def add(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Add `delta` to x in place, rounded like `RMSNorm.of_sum`."""
    kernel = elementwise_on_cpu(x)
    return x.add_(delta) if kernel is None else kernel.add(x, delta)
