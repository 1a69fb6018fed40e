"""Products of experts: rows are sorted by expert, so each weight is read once."""

from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernels.linear import PANEL
from engine.kernels.matrices import PackedMatrices
from engine.layers.grouped_product import grouped_product
from engine.layers.linear import kernel_for, packable, silu_mul
from engine.quant.integers import Weight, columns_of, dense_of


class _Matrices(Protocol):
    def take(self, other: Any) -> None: ...

    def gated(self, x: Tensor, rows: Tensor) -> Tensor: ...

    def partial(self, x: Tensor, rows: Tensor) -> Tensor: ...


class Experts:
    """Routed experts of one layer.

    `gate_up`: [2 * intermediate, hidden] each; `down`: [hidden, intermediate]; both are emptied.
    `segments`: of the intermediate, summed apart.
    """

    def __init__(self, gate_up: list[Weight], down: list[Weight], *, segments: int) -> None:
        self._width = down[0].shape[1] // segments
        self._gate_up = _pack(gate_up)
        starts = range(0, down[0].shape[1], self._width)
        self._downs = [_pack([columns_of(matrix, slice(at, at + self._width)) for matrix in down]) for at in starts]
        gate_up.clear()
        down.clear()

    def take(self, other: "Experts") -> None:
        """Take weights of `other`, in torch into the same memory."""
        for mine, theirs in zip([self._gate_up, *self._downs], [other._gate_up, *other._downs], strict=True):
            mine.take(theirs)

    def __call__(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        """[T, hidden] fp32 per segment; x [T, hidden] sorted by expert, `rows` [experts] i64."""
        parts = torch.split(self._gate_up.gated(x, rows), self._width, dim=1)
        return [down.partial(part.contiguous(), rows) for part, down in zip(parts, self._downs, strict=True)]


class _TorchMatrices:
    """Torch's grouped product, without host sync."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self._weights = torch.stack([matrix.t() for matrix in matrices])

    def take(self, other: "_TorchMatrices") -> None:
        self._weights.copy_(other._weights)

    def gated(self, x: Tensor, rows: Tensor) -> Tensor:
        return silu_mul(self._times(x, rows))

    def partial(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._times(x, rows).float()

    def _times(self, x: Tensor, rows: Tensor) -> Tensor:
        return grouped_product(x, self._weights, rows)


class _PlainlyGated:
    def __init__(self, packed: PackedMatrices) -> None:
        self._packed = packed
        self.partial = packed.partial

    def take(self, other: "_PlainlyGated") -> None:
        self._packed.take(other._packed)

    def gated(self, x: Tensor, rows: Tensor) -> Tensor:
        return silu_mul(self._packed.times(x, rows))


def _pack(matrices: list[Weight]) -> _Matrices:
    first = matrices[0]
    kernel = kernel_for(first)
    if kernel is None:
        return _TorchMatrices([dense_of(matrix) for matrix in matrices])
    gates = len(first) % PANEL == 0
    packed = PackedMatrices(kernel, [packable(matrix) for matrix in matrices], gates=gates)
    return packed if gates else _PlainlyGated(packed)
