# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products with the packed matrices of packed.py.

For more than MOST_ROWS rows cuBLAS multiplies dense parts: it is faster there, and a part is
widened once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.packed import BLOCK, PackedForm, packed, packed_dense_kernel, packed_places, packed_sums
from engine.quant.integers import Integers

MOST_ROWS = 256
PROGRAMS = 256  # two a multiprocessor, where splits of the inputs give as many
TILE_INPUTS = 256
SPLIT_TILES = 4  # minimum of a split
DENSE_BYTES = 64 << 20  # of a dense part
SUM_TILE = 1024


@triton.jit(do_not_specialize=["rows", "tiles", "split_tiles", "of_output"])
def packed_linear_kernel(
    x_ptr,  # [rows, x_stride]
    words_ptr,  # int32 [blocks, tiles, BLOCK, FORM.tile / 2]
    factors_ptr,  # int32 [blocks, of_output, FORM.each]
    bias_ptr,  # [outputs], or None
    y_ptr,  # [splits, rows, outputs]
    rows,
    width,
    outputs,
    tiles,
    split_tiles,
    of_output,  # factors
    x_stride,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (rows, outputs, split); sums are in the order of inputs."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    mask_m, mask_n = m < rows, n < outputs
    words, factors = packed_places(words_ptr, factors_ptr, n, outputs, tiles, of_output, FORM)
    first = tl.program_id(2) * split_tiles
    acc = packed_sums(
        x_ptr + m.to(tl.int64) * x_stride,
        mask_m,
        words,
        factors,
        first,
        tl.minimum(first + split_tiles, tiles),
        width,
        FORM,
        WHOLE,
        STAGES,
        PRECISION,
    )
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    y_ptr += tl.program_id(2).to(tl.int64) * rows * outputs
    target = y_ptr + m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def packed_sum_kernel(parts_ptr, bias_ptr, y_ptr, rows, splits, outputs, TILE: tl.constexpr):
    """Program (row, outputs): parts [splits, rows, outputs] in order, plus the bias."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = n < outputs
    total = tl.load(parts_ptr + row * outputs + n, mask=mask, other=0.0)
    for split in range(1, splits):
        total += tl.load(parts_ptr + (split * rows + row) * outputs + n, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * outputs + n, total.to(y_ptr.dtype.element_ty), mask=mask)


class PackedLinear:
    """y = x W^T + b; `weight_fits` accepted `weight` [out, in], which is dropped."""

    def __init__(self, weight: Integers, bias: Tensor | None) -> None:
        found = packed([weight], inputs=TILE_INPUTS)
        assert found is not None and found.factors is not None and found.form is not None, (
            "the caller asked weight_fits"
        )
        _, self._outputs, self._width = found.shape
        self._bias, self._form = bias, found.form
        self._words, self._factors = found.weight[0], found.factors[0]
        self._tiles = self._words.shape[1]
        self._split_tiles = -(-self._tiles // splits_of(len(self._words), self._tiles))

    def times(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return [T, out] in `dtype`, default x's, rounded once."""
        y = torch.empty((len(x), self._outputs), dtype=dtype or x.dtype, device=x.device)
        if len(x) > MOST_ROWS:
            self._by_dense_parts(x, y)
        elif len(x):
            self._in_registers(x if x.stride(1) == 1 else x.contiguous(), y)
        return y

    def partial(self, x: Tensor) -> Tensor:
        """Return unrounded fp32 sums [T, out]."""
        return self.times(x, dtype=torch.float32)

    def _in_registers(self, x: Tensor, y: Tensor) -> None:
        rows, constants = len(x), product_constants(self._form, len(x), self._width, x.dtype)
        splits = -(-self._tiles // self._split_tiles)
        sums = y if splits == 1 else torch.empty((splits, *y.shape), dtype=torch.float32, device=y.device)
        grid = triton.cdiv(rows, constants["TILE_M"]), triton.cdiv(self._outputs, constants["TILE_N"]), splits
        packed_linear_kernel[grid](
            x,
            self._words,
            self._factors,
            self._bias if splits == 1 else None,
            sums,
            rows,
            self._width,
            self._outputs,
            self._tiles,
            self._split_tiles,
            self._factors.shape[1],
            x.stride(0),
            **constants,
        )
        if splits > 1:
            of_sums = rows, triton.cdiv(self._outputs, SUM_TILE)
            packed_sum_kernel[of_sums](sums, self._bias, y, rows, splits, self._outputs, TILE=SUM_TILE)

    def _by_dense_parts(self, x: Tensor, y: Tensor) -> None:
        blocks = max(1, DENSE_BYTES // (BLOCK * self._width * x.element_size()))
        for first in range(0, len(self._words), blocks):
            own = min(blocks, len(self._words) - first)
            dense = torch.empty((own * BLOCK, self._width), dtype=x.dtype, device=x.device)
            packed_dense_kernel[(self._tiles, own)](
                self._words,
                self._factors,
                dense,
                first,
                self._width,
                self._tiles,
                self._factors.shape[1],
                FORM=self._form,
                num_warps=4,
            )
            part = y[:, first * BLOCK : (first + own) * BLOCK]
            product = dense[: part.shape[1]].t()
            if y.dtype == x.dtype:
                torch.mm(x, product, out=part)
            else:
                torch.mm(x, product, out_dtype=y.dtype, out=part)
        if self._bias is not None:
            y += self._bias


def product_constants(form: PackedForm, rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    tile_m, tile_n, warps, stages = (64, 128, 8, 4) if rows > 32 else (32 if rows > 16 else 16, 64, 4, 5)
    return {
        "FORM": form,
        "WHOLE": width % form.inputs == 0,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "STAGES": stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": warps,
        "num_stages": stages,
    }


def splits_of(blocks: int, tiles: int) -> int:
    """Splits of a matrix's input `tiles`, for any number of rows."""
    splits = 1
    while blocks * splits < PROGRAMS and tiles >= 2 * splits * SPLIT_TILES:
        splits *= 2
    return splits
