"""What latent attention (MLA) hands to its backends, and the products of each head with a matrix of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.linear import linear_kernel
from engine.kernels.matrices import PackedMatrices


@dataclass(frozen=True, slots=True)
class NewLatents:
    """New tokens, turned. q [T, heads, width]: absorbed, so that its scores are its products with latents, times `scale`.

    latents [T, width]: what the cache keeps, all heads' K, and in its first `rank` elements (`CacheSpec.latent`) their V. A
    backend gives [T, heads * rank].
    """

    q: Tensor
    latents: Tensor
    scale: float


class HeadProducts:
    """y[t, h] = matrices[h] x[t, h]. `matrices`: of each head [out, in]; the list is emptied.

    With our kernel a row of the result depends on that row alone, to the bit.
    """

    def __init__(self, matrices: list[Tensor]) -> None:
        first, self._heads = matrices[0], len(matrices)
        kernel = linear_kernel() if first.device.type == "cpu" and first.dtype == torch.bfloat16 else None
        self._packed = None if kernel is None else PackedMatrices(kernel, matrices)
        self._weights = None if kernel is not None else torch.stack([matrix.t() for matrix in matrices])
        matrices.clear()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, out], a view, for x [T, heads, in]."""
        by_head = x.transpose(0, 1)
        if self._packed is None:
            assert self._weights is not None
            return torch.bmm(by_head, self._weights).transpose(0, 1)
        rows = torch.full((self._heads,), len(x), dtype=torch.int64)
        y = self._packed.times(by_head.reshape(-1, x.shape[2]), rows)
        return y.view(self._heads, len(x), -1).transpose(0, 1)
