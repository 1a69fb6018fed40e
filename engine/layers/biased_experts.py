"""Experts with biases and clamped gates (gpt-oss)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.matrices import PackedMatrices
from engine.layers.grouped_product import grouped_product
from engine.layers.linear import kernel_for, packable
from engine.quant.integers import Weight, columns_of, dense_of


class BiasedExperts:
    """Experts with biases and clamped gates.

    `gate_up`: [2 * intermediate, hidden] each, alternating rows; `down`: [hidden, intermediate].
    Biases are fp32; `down_bias` is None on ranks that must not add it. `segments`: of the
    intermediate. out = down((up + 1) * gate * sigmoid(alpha * gate)), gate <= `limit`, |up| <=
    `limit`.
    """

    def __init__(
        self,
        gate_up: Sequence[Weight],
        gate_up_bias: Tensor,
        down: Sequence[Weight],
        down_bias: Tensor | None,
        *,
        alpha: float,
        limit: float,
        segments: int,
    ) -> None:
        self._gate_up, self._gate_up_bias, self._down_bias = _Sums(gate_up), gate_up_bias, down_bias
        self._alpha, self._limit = alpha, limit
        self._width = down[0].shape[1] // segments
        starts = range(0, down[0].shape[1], self._width)
        self._downs = [_Sums([columns_of(matrix, slice(at, at + self._width)) for matrix in down]) for at in starts]
        self._count = len(gate_up)

    def take(self, other: "BiasedExperts") -> None:
        for mine, theirs in zip([self._gate_up, *self._downs], [other._gate_up, *other._downs], strict=True):
            mine.take(theirs)
        self._gate_up_bias.copy_(other._gate_up_bias)
        if self._down_bias is not None:
            assert other._down_bias is not None, "of one rank"
            self._down_bias.copy_(other._down_bias)

    def __call__(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        """[T, hidden] fp32 per segment; x [T, hidden] sorted by expert, `rows` [experts] i64."""
        places = torch.arange(len(x), device=x.device)
        expert = torch.bucketize(places, rows.cumsum(0), right=True).clamp_(max=self._count - 1)  # no expert: any
        both = self._gate_up(x, rows) + self._gate_up_bias[expert]
        gate, up = both[:, ::2].clamp(max=self._limit), both[:, 1::2].clamp(-self._limit, self._limit)
        inner = ((up + 1) * gate * torch.sigmoid(self._alpha * gate)).to(x.dtype)
        parts = torch.split(inner, self._width, dim=1)
        sums = [down(part.contiguous(), rows) for part, down in zip(parts, self._downs, strict=True)]
        if self._down_bias is not None:
            sums[0] = sums[0] + self._down_bias[expert]
        return sums


class _Sums:
    def __init__(self, matrices: Sequence[Weight]) -> None:
        kernel = kernel_for(matrices[0])
        self._packed = None if kernel is None else PackedMatrices(kernel, [packable(matrix) for matrix in matrices])
        self._weights = torch.stack([dense_of(matrix).t() for matrix in matrices]) if kernel is None else None

    def take(self, other: "_Sums") -> None:
        if self._packed is not None:
            assert other._packed is not None, "of one kernel"
            self._packed.take(other._packed)
        else:
            assert self._weights is not None and other._weights is not None, "of one kernel"
            self._weights.copy_(other._weights)

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed.partial(x, rows)
        assert self._weights is not None
        return grouped_product(x, self._weights, rows).float()
