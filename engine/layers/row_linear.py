"""y = x W^T + b over ranks that hold some columns of W each, and of x the same."""

import torch

from engine.layers.linear import Delta, sums_matrix
from engine.parallel.collectives import Collectives
from engine.quant.integers import Weight


class RowLinear:
    """Maps [T, own in] of each rank to [T, out] on all: their fp32 sums are added in a fixed tree and rounded once.

    `weight` [out, own in]; `bias` [out] on rank 0, None on the others. `segments`: as in PackedMatrix, of the own inputs.
    `delta(x, y)` changes the own sums y, fp32, in place.
    """

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None, *, collectives: Collectives, segments: int = 1
    ) -> None:
        assert bias is None or collectives.rank == 0, "the bias would be added once for each rank"
        self._matrix = sums_matrix(weight, bias, segments=segments)
        self._collectives = collectives
        self.delta: Delta | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        partial = self._matrix.partial(x)
        if self.delta is not None:
            self.delta(x, partial)
        return summed(self._collectives, partial, dtype=x.dtype)


def summed(collectives: Collectives, partial: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The sum of all ranks' `partial` [T, n] fp32, as `dtype`."""
    rounded = torch.float32 if dtype == torch.float16 else dtype
    return collectives.sum(partial, dtype=rounded).to(dtype)
