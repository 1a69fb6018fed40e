"""Linear layers, embeddings and norms; bf16 on CPUs is packed for our kernel or oneDNN.

Quantized weights stay packed only in our kernels.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Protocol, overload

import torch
from torch.nn import functional

from engine.kernels.integer_layout import fits
from engine.kernels.linear import PANEL, LinearKernel, PackedMatrix, linear_kernel
from engine.kernels.rows import LANES, elementwise_for, elementwise_on_cpu, takes_triton
from engine.parallel.collectives import Collectives, tree_sum
from engine.parallel.layout import Extent, cut_of
from engine.quant.integers import Weight, dense_of

if TYPE_CHECKING:
    from engine.kernels.triton.linear import StreamedLinear, Weighed
    from engine.kernels.triton.packed_linear import PackedLinear

# ---- Products and norms that are launched with the sum and the norm that read them.


@dataclass(frozen=True, slots=True)
class DeferredProduct:
    """(x W^T + b) * scale [T, out] on a GPU, for one reader."""

    matrix: "StreamedLinear"
    x: torch.Tensor
    scale: float = 1.0

    def product(self) -> torch.Tensor:
        y = self.matrix.times(self.x)
        return y if self.scale == 1.0 else y.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """norm(x) [T, D] on a GPU, for one reader."""

    norm: "RMSNorm"
    x: torch.Tensor

    def product(self) -> torch.Tensor:
        return self.norm(self.x)


Addend = torch.Tensor | DeferredProduct | DeferredNorm


@overload
def settled(delta: Addend) -> torch.Tensor: ...
@overload
def settled(delta: None) -> None: ...
def settled(delta: Addend | None) -> torch.Tensor | None:
    return delta.product() if isinstance(delta, DeferredProduct | DeferredNorm) else delta


# ---- RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016).


class RMSNorm:
    """x / sqrt(mean(x**2) + eps) * weight over the last dim of x [T, D], in fp32.

    With an `offset` it multiplies by weight + offset (Gemma), in fp32 for any weight dtype.
    """

    def __init__(self, weight: torch.Tensor, *, eps: float, offset: float = 0.0) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self._kernel = elementwise_for(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self.weight, eps=self.eps, offset=self.offset)
        if not self.offset:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        weight = self.weight.float() + self.offset
        return functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)

    def of_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize columns of a wider tensor, without a copy on a GPU."""
        return self(x.contiguous() if x.device.type == "cpu" else x)

    def of_sum(self, x: torch.Tensor, delta: Addend | None) -> torch.Tensor:
        """Add `delta` to x in place; return the norm."""
        if delta is None:
            return self(x)
        if isinstance(delta, DeferredNorm):
            return _norm_of_norm(self, x, delta)
        if self._kernel is not None:
            return self._kernel.rms_norm(x, self.weight, eps=self.eps, delta=settled(delta), offset=self.offset)
        return self(x.add_(settled(delta)))


def _norm_of_norm(norm: RMSNorm | None, x: torch.Tensor, delta: DeferredNorm) -> torch.Tensor:
    from engine.kernels.triton.elementwise import norm_of_normed_sum

    weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
    inner = delta.norm
    return norm_of_normed_sum(
        x, delta.x, weight, inner.weight, eps=eps, inner_eps=inner.eps, offsets=(offset, inner.offset)
    )


class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, in fp32, by default 1 and 0."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, *, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps)

    def of_sum(self, x: torch.Tensor, delta: Addend | None) -> torch.Tensor:
        return self(x if delta is None else add(x, delta))


class Scaled:
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kernel = elementwise_on_cpu(x)
        return x.mul_(self._factor) if kernel is None else kernel.scale(x, self._factor)

    def later(self, x: Addend) -> Addend:
        """`x` scaled, in place or when it is read."""
        return replace(x, scale=self._factor) if isinstance(x, DeferredProduct) else self(settled(x))


class NoNorm:
    """The identity."""

    def of_sum(self, x: torch.Tensor, delta: Addend | None) -> torch.Tensor:
        """Add `delta` to x in place; the caller must not write the result."""
        if isinstance(delta, DeferredNorm):
            return _norm_of_norm(None, x, delta)
        return x if delta is None else add(x, delta)


Norm = RMSNorm | LayerNorm
Normed = Norm | NoNorm


def normed_later(norm: Norm, x: Addend) -> Addend:
    """norm(x), or on a GPU a norm for the one that adds it."""
    x = settled(x)
    return DeferredNorm(norm, x) if not isinstance(norm, LayerNorm) and takes_triton(x.device) else norm(x)


@dataclass(eq=False)
class WholeNorm:
    """RMS norms of q and k over all heads, before RoPE (OLMo 2).

    `weights`: [own heads * head_dim] each. `copies`: ranks with the same k heads.
    """

    weights: tuple[torch.Tensor, torch.Tensor]
    _: KW_ONLY
    sizes: tuple[int, int]
    eps: float
    collectives: Collectives
    copies: int

    def __call__(self, qkv: torch.Tensor) -> None:
        q, k = (len(weight) for weight in self.weights)
        if (q, k) == self.sizes and takes_triton(qkv.device):
            from engine.kernels.triton.elementwise import whole_norm

            whole_norm(qkv, self.weights, eps=self.eps)
            return
        parts = qkv[:, :q], qkv[:, q : q + k]
        squares = torch.stack([part.float().square().sum(-1) for part in parts], 1)
        squares[:, 1] /= self.copies
        squares = self.collectives.sum(squares, dtype=torch.float32)
        for i, (part, weight) in enumerate(zip(parts, self.weights, strict=True)):
            scale = torch.rsqrt(squares[:, i : i + 1] / self.sizes[i] + self.eps)
            part.copy_(part.float() * scale * weight)


def add(x: torch.Tensor, delta: Addend) -> torch.Tensor:
    """Add `delta` to x in place, rounded like `RMSNorm.of_sum`."""
    kernel = elementwise_on_cpu(x)
    return x.add_(settled(delta)) if kernel is None else kernel.add(x, settled(delta))


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

    def later(self, x: torch.Tensor) -> Addend:
        """self(x), or on a GPU a product for the norm that adds it.

        Rows without their norm's factor may exceed fp16.
        """
        matrix = self._streamed(len(x))
        return self(x) if matrix is None or x.dtype == torch.float16 else DeferredProduct(matrix, x)

    def of_norm(self, norm: Normed, x: torch.Tensor, delta: Addend | None) -> torch.Tensor:
        """self(norm.of_sum(x, delta)); fused on CPUs, to the bit, and on GPUs."""
        matrix = self._fused()
        if matrix is not None and isinstance(norm, RMSNorm) and not norm.offset:
            return matrix.times_normed(x, norm.weight, eps=norm.eps, delta=settled(delta))
        streamed = self._streamed(len(x))
        return self(norm.of_sum(x, delta)) if streamed is None else streamed.times(_weighed(norm, x, delta))

    def gated_of_norm(self, norm: Normed, x: torch.Tensor, delta: Addend | None, *, gate: str = "silu") -> torch.Tensor:
        """GATES[gate](self.of_norm(norm, x, delta)), fused like it."""
        matrix = self._fused()
        if matrix is not None and matrix.gates and isinstance(norm, RMSNorm) and not norm.offset:
            return matrix.times_normed(x, norm.weight, eps=norm.eps, delta=settled(delta), gated=True)
        streamed = self._streamed(len(x))
        if streamed is not None:
            return streamed.times(_weighed(norm, x, delta), gate=gate)
        return GATES[gate](self.of_norm(norm, x, delta))

    def _streamed(self, rows: int) -> "StreamedLinear | None":
        streamed = self._matrix.streamed if isinstance(self._matrix, _GpuMatrix) and self.delta is None else None
        return streamed if streamed is not None and streamed.takes(rows) else None

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


class _GpuMatrix(_PlainMatrix):
    """Few rows by our kernel, others by cuBLAS."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        from engine.kernels.triton.linear import StreamedLinear

        weight = weight.contiguous()
        super().__init__(weight, bias)
        self.streamed = StreamedLinear(weight, bias)

    def times(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.streamed.times(x, dtype=dtype) if self.streamed.takes(len(x)) else super().times(x, dtype=dtype)


def _weighed(norm: Normed, x: torch.Tensor, delta: Addend | None) -> "torch.Tensor | Weighed":
    """Return norm.of_sum(x, delta), perhaps without the factors of rows."""
    if isinstance(delta, DeferredProduct) and isinstance(norm, RMSNorm):
        return delta.matrix.add_to(x, delta.x, scale=delta.scale, norm=norm.weight, eps=norm.eps, offset=norm.offset)
    return norm.of_sum(x, delta)


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
    from engine.kernels.triton.packed import weight_fits
    from engine.kernels.triton.packed_linear import PackedLinear

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
    if takes_triton(weight.device) and weight.dtype in (torch.bfloat16, torch.float16):
        return _GpuMatrix(weight, bias)
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

    def later(self, x: torch.Tensor) -> torch.Tensor:
        """self(x): ranks add up before the residual."""
        return self(x)


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
