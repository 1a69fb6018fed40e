# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Decode products for GPUs: few rows times a matrix that streams from memory.

A row has the same bits in any batch of up to MAX_ROWS: its sums follow the inputs in splits that
depend only on the matrix, and other sums are trees of elementwise additions.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton.elementwise import gated
from engine.kernels.triton.packed_linear import splits_of

# Residual, norm and gate are fused. A norm's factor needs a whole row, which no program has: the product before the norm stores
# rows times the norm's weight and sums of squares, the product behind it multiplies its sums by the factors.
MAX_ROWS = 64
STEP = 128  # inputs; splits are multiples
GROUP = 64  # outputs of a sum of squares
KERNEL_GROUP = tl.constexpr(GROUP)
KERNEL_LINE = tl.constexpr(64)  # of 128 bytes
LARGEST = 256 << 20  # bytes of a matrix
COUNTERS = 4096  # blocks of a matrix that is split


def streams(outputs: int, inputs: int, rows: int) -> bool:
    """True if this kernel, not cuBLAS, multiplies `rows` by a 16-bit matrix [outputs, inputs]."""
    # On an H200 (docs/reports/gpu.md) cuBLAS reads QKV, out and down at 0.63 to 0.78 of the copy rate. It reads gate and up at
    # 0.95, but norm and gate in kernels of their own take 8 % of that time: ours pays from 0.87 on. It reads heads at 0.98, with
    # nothing to fuse, and the inputs of larger batches fewer times. `benchmarks.gpu.products` measures both.
    return rows <= MAX_ROWS and inputs % 8 == 0 and 2 * outputs * inputs <= LARGEST


@dataclass(frozen=True, slots=True)
class LinearTiles:
    rows: int
    outputs: int
    inputs: int  # of an iteration
    warps: int
    stages: int


@cache
def linear_tiles(rows: int) -> LinearTiles:
    # for sm_90 without spills (tests compile them)
    if rows <= 16:  # three programs a multiprocessor
        return LinearTiles(rows=16, outputs=64, inputs=64, warps=4, stages=7)
    if rows <= 32:
        return LinearTiles(rows=32, outputs=64, inputs=64, warps=4, stages=6)
    return LinearTiles(rows=64, outputs=128, inputs=64, warps=8, stages=4)  # two


@triton.jit
def _sums(x):
    """Add up x [a, n, b] over n, a power of two, as a tree: bits do not depend on layouts."""
    for _ in tl.static_range(12):
        if x.shape[1] > 1:
            pairs = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, x.shape[2]])
            low, high = tl.split(tl.permute(pairs, [0, 2, 3, 1]))
            x = low + high
    return tl.reshape(x, [x.shape[0], x.shape[2]])


class _Inputs(NamedTuple):
    COUNT: Any
    OF_SPLIT: Any
    TILE: Any
    STAGES: Any
    PRECISION: Any


@triton.jit
def _read_ahead(weight, INPUTS: tl.constexpr, SPLIT_INPUTS: tl.constexpr, COUNT: tl.constexpr):
    """Bring at most COUNT inputs of a split into the L2 cache."""
    for at in tl.static_range(0, min(COUNT, SPLIT_INPUTS), KERNEL_LINE):
        line = weight + tl.minimum(tl.program_id(1) * SPLIT_INPUTS + at, INPUTS - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _product(x, mask_m, weight, inputs):
    """Sums of a split [TILE_N, TILE_M], in order; pointers x [1, TILE_M], weight [TILE_N, 1]."""
    first = tl.program_id(1) * inputs.OF_SPLIT
    end = tl.minimum(first + inputs.OF_SPLIT, inputs.COUNT)
    acc = tl.zeros([weight.shape[0], x.shape[1]], tl.float32)
    for at in tl.range(first, end, inputs.TILE, num_stages=inputs.STAGES):
        k = at + tl.arange(0, inputs.TILE)
        if inputs.COUNT % inputs.TILE == 0:
            words = tl.load(weight + k[None, :])
            rows = tl.load(x + k[:, None], mask=mask_m[None, :], other=0.0)
        else:
            inside = k < inputs.COUNT
            words = tl.load(weight + k[None, :], mask=inside[None, :], other=0.0)
            rows = tl.load(x + k[:, None], mask=mask_m[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(words, rows, acc, input_precision=inputs.PRECISION)
    return acc


@triton.jit
def _is_last(acc, parts_ptr, done_ptr, SPLITS: tl.constexpr):
    """Store a split's sums; true in the program that stored the block's last."""
    n, m = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    part = tl.program_id(0) * SPLITS + tl.program_id(1)
    parts_ptr += part.to(tl.int64) * (acc.shape[0] * acc.shape[1])
    tl.store(parts_ptr + n[:, None] * acc.shape[1] + m[None, :], acc)
    done_ptr += tl.program_id(0)
    tl.debug_barrier()  # all threads store before one counts
    last = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        tl.store(done_ptr, 0)
    tl.debug_barrier()  # what one thread saw becomes visible to all
    return last


@triton.jit
def _merged(parts_ptr, SPLITS: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr):
    n, m = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    parts_ptr += tl.program_id(0).to(tl.int64) * (SPLITS * TILE_N * TILE_M) + n[:, None] * TILE_M + m[None, :]
    acc = tl.load(parts_ptr)
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(parts_ptr + split * (TILE_N * TILE_M))
    return acc


@triton.jit
def _factors(squares_ptr, m, mask_m, rows, eps, WIDTH: tl.constexpr):
    """Return 1 / RMS of rows [1, TILE_M] from squares [groups, rows]."""
    GROUPS: tl.constexpr = (WIDTH + KERNEL_GROUP - 1) // KERNEL_GROUP
    AT_ONCE: tl.constexpr = 16
    group = tl.arange(0, AT_ONCE)
    total = tl.zeros([1, m.shape[0]], tl.float32)
    for at in tl.static_range(0, GROUPS, AT_ONCE):
        mask = mask_m[None, :] & (at + group < GROUPS)[:, None]
        squares = tl.load(squares_ptr + (at + group)[:, None] * rows + m[None, :], mask=mask, other=0.0)
        total += _sums(squares[None, :, :])
    return 1.0 / tl.sqrt(total / WIDTH + eps)


@triton.jit
def _add_and_weigh(out, n, m, inside, rows, to):
    dtype = to.residual_ptr.dtype.element_ty
    at = m.to(tl.int64)[None, :] * to.WIDTH + n[:, None]
    x = tl.load(to.residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = (x + (out.to(tl.float32) * to.scale).to(dtype).to(tl.float32)).to(dtype)
    tl.store(to.residual_ptr + at, x, mask=inside)
    wide = tl.where(inside, x.to(tl.float32), 0.0)
    weight = tl.load(to.norm_ptr + n, mask=n < to.WIDTH, other=0.0).to(tl.float32) + to.offset
    tl.store(to.weighed_ptr + at, (wide * weight[:, None]).to(dtype), mask=inside)
    TILE_N: tl.constexpr = out.shape[0]
    GROUPS: tl.constexpr = TILE_N // KERNEL_GROUP
    squares = _sums(tl.reshape(wide * wide, [GROUPS, KERNEL_GROUP, out.shape[1]]))
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    mask = (group * KERNEL_GROUP < to.WIDTH)[:, None] & (m < rows)[None, :]
    tl.store(to.squares_ptr + group[:, None] * rows + m[None, :], squares, mask=mask)


class _Residual(NamedTuple):
    residual_ptr: Any  # [rows, WIDTH]
    scale: Any  # of what is added
    norm_ptr: Any  # [WIDTH]
    offset: Any
    weighed_ptr: Any  # [rows, WIDTH]
    squares_ptr: Any  # [groups, rows] fp32
    WIDTH: Any


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,  # [rows, x_stride]
    squares_ptr,  # [groups, rows] fp32 of rows before their norm's weight; None: x is complete
    weight_ptr,  # [WIDTH, INPUTS]; with a GATE, as many rows of gates are first
    bias_ptr,  # [WIDTH], with a GATE twice; None: none
    y_ptr,  # [rows, WIDTH]; None: added to the residual
    parts_ptr,  # [blocks, SPLITS, TILE_N, TILE_M] fp32
    done_ptr,  # [blocks] int32: 0
    residual_ptr,
    norm_ptr,
    weighed_ptr,
    next_squares_ptr,
    rows,
    x_stride,
    eps,
    scale,
    offset,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program (block of outputs, split of inputs)."""
    OWN: tl.constexpr = TILE_N if GATE == "" else TILE_N // 2
    m, row, n = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.program_id(0) * OWN + tl.arange(0, OWN)
    mask_m = m < rows
    row = tl.minimum(tl.program_id(0) * OWN + row % OWN, WIDTH - 1) + row // OWN * WIDTH
    weight_ptr += row.to(tl.int64)[:, None] * INPUTS
    if AHEAD:  # of the kernel before, which writes no weights
        _read_ahead(weight_ptr, INPUTS, SPLIT_INPUTS, STAGES * TILE_K)
        gdc_wait()
        gdc_launch_dependents()
    x_ptr += m.to(tl.int64)[None, :] * x_stride
    acc = _product(x_ptr, mask_m, weight_ptr, _Inputs(INPUTS, SPLIT_INPUTS, TILE_K, STAGES, PRECISION))
    if SPLITS > 1:
        if not _is_last(acc, parts_ptr, done_ptr, SPLITS):
            return
        acc = _merged(parts_ptr, SPLITS, TILE_N, TILE_M)
    if squares_ptr is not None:
        acc *= _factors(squares_ptr, m, mask_m, rows, eps, INPUTS)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    dtype = x_ptr.dtype.element_ty
    if GATE != "":
        gate, up = tl.split(tl.permute(tl.reshape(acc.to(dtype), [2, OWN, TILE_M]), [1, 2, 0]))
        acc = gated(gate.to(tl.float32), up.to(tl.float32), dtype, GATE == "gelu_tanh")
    inside = (n < WIDTH)[:, None] & mask_m[None, :]
    if residual_ptr is None:
        tl.store(y_ptr + m.to(tl.int64)[None, :] * WIDTH + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        to = _Residual(residual_ptr, scale, norm_ptr, offset, weighed_ptr, next_squares_ptr, WIDTH)
        _add_and_weigh(acc.to(dtype), n, m, inside, rows, to)


class Weighed(NamedTuple):
    """Rows [T, D] times a norm's weight; sums of squares before it, [groups, T] fp32."""

    rows: Tensor
    squares: Tensor
    eps: float


class StreamedLinear:
    """y = x W^T + b for up to MAX_ROWS rows; `weight` [out, in] is dense, bf16 or fp16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._outputs, self._inputs = weight.shape
        splits = splits_of(triton.cdiv(self._outputs, GROUP), triton.cdiv(self._inputs, GROUP))
        split_inputs = triton.cdiv(self._inputs, splits * STEP) * STEP
        self.split_constants = {"SPLITS": triton.cdiv(self._inputs, split_inputs), "SPLIT_INPUTS": split_inputs}

    def takes(self, rows: int) -> bool:
        return rows > 0 and streams(self._outputs, self._inputs, rows)

    def times(self, x: Tensor | Weighed, *, gate: str = "", dtype: torch.dtype | None = None) -> Tensor:
        """Return [T, out], or with a `gate` [T, out / 2], in `dtype`, default x's.

        `gate`: "silu" or "gelu_tanh", of the first outputs.
        """
        rows = x.rows if isinstance(x, Weighed) else x
        width = self._outputs // 2 if gate else self._outputs
        y = torch.empty((len(rows), width), dtype=dtype or rows.dtype, device=rows.device)
        self._launch(x, y, width, gate=gate)
        return y

    def add_to(
        self, residual: Tensor, x: Tensor, *, norm: Tensor, eps: float, offset: float, scale: float = 1.0
    ) -> Weighed:
        """Add `scale` * (x W^T + b, rounded) to `residual` [T, out]; weigh by `norm` + `offset`."""
        assert residual.is_contiguous() and residual.shape == (len(x), self._outputs), residual.shape
        groups = triton.cdiv(self._outputs, GROUP)
        squares = torch.empty((groups, len(x)), dtype=torch.float32, device=x.device)
        weighed = Weighed(torch.empty_like(residual), squares, eps)
        self._launch(
            x, None, self._outputs, residual=(residual, norm, weighed.rows, squares), scale=scale, offset=offset
        )
        return weighed

    def _launch(
        self,
        x: Tensor | Weighed,
        y: Tensor | None,
        width: int,
        *,
        gate: str = "",
        residual: tuple[Tensor | None, ...] = (None,) * 4,
        scale: float = 1.0,
        offset: float = 0.0,
    ) -> None:
        x, squares, eps = x if isinstance(x, Weighed) else (x, None, 0.0)
        assert x.shape == (len(x), self._inputs), x.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        tiles, device = linear_tiles(len(x)), x.device
        blocks = triton.cdiv(width, tiles.outputs // (2 if gate else 1))
        splits = self.split_constants["SPLITS"]
        parts, done = None, None
        if splits > 1:
            assert blocks <= COUNTERS, blocks
            parts = torch.empty((blocks * splits, tiles.outputs, tiles.rows), dtype=torch.float32, device=device)
            done = counters(device)
        linear_kernel[(blocks, splits)](
            x,
            squares,
            self._weight,
            self._bias,
            y,
            parts,
            done,
            *residual,
            len(x),
            x.stride(0),
            eps,
            scale,
            offset,
            INPUTS=self._inputs,
            WIDTH=width,
            GATE=gate,
            **self.split_constants,
            **tile_constants(tiles, x.dtype),
            **launch_options(tiles, ahead=launches_ahead(device)),
        )


def tile_constants(tiles: LinearTiles, dtype: torch.dtype) -> dict[str, Any]:
    precision = "ieee" if dtype == torch.float32 else "tf32"
    sizes = {"TILE_M": tiles.rows, "TILE_N": tiles.outputs, "TILE_K": tiles.inputs, "STAGES": tiles.stages}
    return {**sizes, "PRECISION": precision}


def launch_options(tiles: LinearTiles, *, ahead: bool) -> dict[str, Any]:
    """`ahead`: programs read weights before the previous kernel ends, which must not write them
    (programmatic dependent launch).
    """
    options = {"AHEAD": ahead, "num_warps": tiles.warps, "num_stages": tiles.stages}
    return options | ({"launch_pdl": True} if ahead else {})


@cache
def launches_ahead(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def counters(device: torch.device) -> Tensor:
    """Return zeros that each kernel leaves as zeros, for the current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _counters(device, stream)


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
