"""Linear layers, embeddings and norms; bf16 on CPUs is packed for our kernel or oneDNN.

Quantized weights stay packed only in our kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from engine.kernels.integer_layout import fits
from engine.kernels.linear import PANEL, LinearKernel, PackedMatrix, linear_kernel
from engine.kernels.rows import LANES, elementwise_for, elementwise_on_cpu, takes_triton
from engine.parallel.collectives import Collectives, tree_sum
from engine.parallel.layout import Extent, cut_of
from engine.quant.integers import Weight, dense_of

if TYPE_CHECKING:
    from engine.kernels.triton.packed_linear import PackedLinear

# ---- RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016).


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
        self._kernel = elementwise_for(weight)

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


# ---- Linear layers.

Delta = Callable[[torch.Tensor, torch.Tensor], None]


class Linear:
    """y = x W^T + b with `weight` [out, in]. Not thread-safe.

    `gates`: the first half of the outputs gates the second. `segments`: as in PackedMatrix.
    `delta(x, y)` changes y in place (LoRA). The caller must drop the plain weight.
    """

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None = None, *, gates: bool = False, segments: int = 1
    ) -> None:
        self._matrix = sums_matrix(weight, bias, segments=segments) if segments > 1 else _matrix(weight, bias, gates)
        self.delta: Delta | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._matrix.times(x)
        if self.delta is not None:
            self.delta(x, y)
        return y

    def of_norm(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """self(norm.of_sum(x, delta)), to the bit; fused in our kernel."""
        matrix = self._fused()
        if matrix is not None and isinstance(norm, RMSNorm):
            return matrix.times_normed(x, norm.weight, eps=norm.eps, delta=delta)
        return self(norm.of_sum(x, delta))

    def gated_of_norm(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """silu_mul(self.of_norm(norm, x, delta)), to the bit; fused in our kernel."""
        matrix = self._fused()
        if matrix is not None and matrix.gates and isinstance(norm, RMSNorm):
            return matrix.times_normed(x, norm.weight, eps=norm.eps, delta=delta, gated=True)
        return silu_mul(self.of_norm(norm, x, delta))

    def _fused(self) -> PackedMatrix | None:
        matrix = self._matrix
        if self.delta is None and isinstance(matrix, PackedMatrix) and matrix.takes_norms:
            return matrix
        return None

    def in_float32(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """self(x) as float32, without delta."""
        y = self._matrix.times(x, dtype=torch.float32)
        return y if out is None else out.copy_(y)


class _OneDnnMatrix:
    """A oneDNN matrix: bits of a plain product, 1.15 to 1.6 times faster for decode."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def times(self, x: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y.to(dtype)


class _PlainMatrix:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def times(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if dtype == torch.float32 and x.is_cuda and self._bias is None:
            return _float32_product(x, self._weight.t())
        y = functional.linear(x, self._weight, self._bias)
        return y if dtype is None else y.to(dtype)


class _SumsMatrix:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, segments: int) -> None:
        self._size = weight.shape[1] // segments
        parts = torch.split(weight.float() if weight.device.type == "cpu" else weight, self._size, dim=1)
        self._weights = [part.t().contiguous() for part in parts]
        self._bias = None if bias is None else bias.float()

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part.contiguous() for part in torch.split(x, self._size, dim=1)]
        sums = [_float32_product(part, weight) for part, weight in zip(parts, self._weights, strict=True)]
        if self._bias is not None:
            sums[0] += self._bias
        return tree_sum(sums)

    def times(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.partial(x).to(x.dtype).to(dtype or x.dtype)


def _float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu" and x.dtype != torch.float32:
        return torch.mm(x, weight, out_dtype=torch.float32)
    return x.float() @ weight


def sums_matrix(
    weight: Weight, bias: torch.Tensor | None, *, segments: int
) -> "PackedMatrix | PackedLinear | _SumsMatrix":
    """Unrounded sums (`partial`). The caller must drop the plain weight."""
    kernel = kernel_for(weight)
    if kernel is not None:
        return kernel.pack(packable(weight, segments=segments), bias, segments=segments)
    packed = _packed_on_gpu(weight, bias) if segments == 1 else None
    return packed or _SumsMatrix(dense_of(weight), bias, segments=segments)


def kernel_for(weight: Weight) -> LinearKernel | None:
    return kernel_on(weight.device, weight.dtype)


def kernel_on(device: torch.device, dtype: torch.dtype) -> LinearKernel | None:
    return linear_kernel() if device.type == "cpu" and dtype == torch.bfloat16 else None


def _packed_on_gpu(weight: Weight, bias: torch.Tensor | None) -> "PackedLinear | None":
    if isinstance(weight, torch.Tensor) or not takes_triton(weight.device):
        return None
    from engine.kernels.triton.packed_linear import PackedLinear, weight_fits

    return PackedLinear(weight, bias) if weight_fits(weight) else None


def packable(weight: Weight, *, segments: int = 1) -> Weight:
    """Unpack weights whose groups the kernel does not support."""
    return weight if isinstance(weight, torch.Tensor) or fits(weight, segments=segments) else weight.dense()


def _matrix(
    weight: Weight, bias: torch.Tensor | None, gates: bool
) -> "PackedMatrix | PackedLinear | _SumsMatrix | _OneDnnMatrix | _PlainMatrix":
    kernel = kernel_for(weight)
    if kernel is not None:
        return kernel.pack(packable(weight), bias, gates=gates and len(weight) % PANEL == 0)
    packed = _packed_on_gpu(weight, bias)
    if packed is not None:
        return packed
    weight = dense_of(weight)
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return _PlainMatrix(weight, bias)
    return _OneDnnMatrix(weight, bias) if _has_onednn() else _PlainMatrix(weight, bias)


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A matrix that adapters may change.

    `parts`: (checkpoint name without ".weight", rows) of a matrix [out, in_size], in order. Sizes
    are the model's, with this rank's cut. `row_order`: checkpoint row of each row in a part.
    """

    in_size: Extent
    parts: tuple[tuple[str, Extent], ...]
    row_order: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        return len(cut_of(self.in_size))

    @property
    def rows(self) -> list[int]:
        return [len(cut_of(rows)) for _, rows in self.parts]


class Adaptable(Protocol):
    """A layer that LoRA adapts; y is bf16, or unrounded fp32 sums."""

    delta: Delta | None


@dataclass(frozen=True, slots=True)
class LinearSite:
    linear: Adaptable
    shape: SiteShape


def _has_onednn() -> bool:
    if not torch._C._has_mkldnn:
        return False
    operations = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in operations) and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :width]) * x[:, width:]; rounds after the silu and at the end.

    SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    kernel = elementwise_for(x, multiple=2 * LANES)
    if kernel is not None:
        return kernel.silu_mul(x)
    gate, up = torch.split(x, x.shape[-1] // 2, dim=-1)
    return functional.silu(gate).mul_(up)


def sigmoid_mul(gates: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """sigmoid(gates) * x, both [T, width]; rounds twice. `gates` may be a column slice."""
    kernel = elementwise_on_cpu(x)
    return torch.sigmoid(gates).mul_(x) if kernel is None else kernel.sigmoid_mul(gates, x)


class RowLinear:
    """Row-parallel [T, own in] -> [T, out]: fp32 sums in a fixed tree, rounded once.

    `bias` [out] only on rank 0. `delta(x, y)` changes the own sums in place.
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
    """All-reduce `partial` [T, n] fp32, to `dtype`."""
    rounded = torch.float32 if dtype == torch.float16 else dtype
    return collectives.sum(partial, dtype=rounded).to(dtype)


# ---- Token embedding, perhaps divided over ranks.


class Embedding:
    """Token vectors, times `scale`. `table` [len(own), hidden]: rows `own` of the vocabulary."""

    def __init__(self, table: torch.Tensor, *, own: range, scale: float, collectives: Collectives) -> None:
        assert len(table) == len(own), (table.shape, own)
        self._table = table
        self._own = own
        self._scale = scale
        self._collectives = collectives

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._rows(ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self._collectives.size == 1:
            return self._table.index_select(0, ids)
        rows = ids - self._own.start
        clamped = rows.clamp(0, len(self._own) - 1)
        # -0.0 + x is x for every x, also -0.0 and 0.0: the sum over ranks equals the one row to the
        # bit
        absent = torch.full((), -0.0, device=ids.device)
        partial = torch.where((rows == clamped)[:, None], self._table.index_select(0, clamped).float(), absent)
        return summed(self._collectives, partial, dtype=self._table.dtype)


# ---- MLP activations.


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(x[:, :width]) * x[:, width:], tanh gelu; rounds after the gelu and at the end.

    GeGLU: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    kernel = elementwise_for(x, multiple=2 * LANES)
    if kernel is not None:
        return kernel.gelu_mul(x)
    gate, up = torch.split(x, x.shape[-1] // 2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_mul,
    "gelu_tanh alone": gelu,
}
