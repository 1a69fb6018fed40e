# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products with fp8, int8, int4 and MXFP4 matrices that stay packed in a GPU's memory.

Up to MOST_ROWS rows, numbers widen in registers, and a row has the same bits in any batch. For more
rows cuBLAS multiplies dense parts: it is faster there, and a part is widened once. Numbers are
interleaved as in Marlin (arXiv:2408.11743).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.quant.integers import Integers

MOST_ROWS = 256
BLOCK = 64  # outputs of a stored tile
TILE = 64  # inputs of one part of a word tile; 32 where groups are so
PROGRAMS = 256  # two a multiprocessor, where splits of the inputs give as many
SPLIT_TILES = 4  # minimum of a split
DENSE_BYTES = 64 << 20  # of a dense part
SUM_TILE = 1024
ONE_GROUP = 1 << 20  # more tiles than a matrix has


@triton.jit
def _wide(words, part: tl.constexpr, less, FORM: tl.constexpr):
    """Part `part` of words [n, k] as bfloat16 [n, 2 k], exactly, minus `less`."""
    # a word is two halves of 16 bits, each with a number of every part; bfloat16's 0x4300 is 128, and its last bit 1;
    # LLVM narrows the fp32 steps to bfloat16, two a register
    if FORM == "e4m3":  # exponent and mantissa in their places: 2**-120 of the number
        both = words if part else words << 8
        wide = _halves((both & -0x7FFF8000) | ((both >> 4) & 0x07F007F0)) * 2.0**120
    elif FORM == "e2m1":  # the same
        both = words >> 4 * part
        wide = _halves(((both & 0x00080008) << 12) | ((both & 0x00070007) << 6)) * 2.0**126
    elif FORM == "int4":
        wide = _halves((words >> 4 * part & 0x000F000F) | 0x43004300) - less
    else:  # a number of 7 bits, less 128 where the eighth is set
        both = words >> 8 * part
        wide = _halves((both & 0x007F007F) | 0x43004300) - _halves((both & 0x00800080) | 0x43004300)
        wide = wide.to(tl.bfloat16).to(tl.float32) - less
    return wide.to(tl.bfloat16)


@triton.jit
def _halves(words):
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1]).to(tl.float32)


@triton.jit
def _less(factor, FORM: tl.constexpr, ZEROS: tl.constexpr):
    """Zero points [n, 1], or their constant."""
    bias: tl.constexpr = 136 if FORM == "int4" else 0
    return ((factor & 0xFF) + (bias - 128)).to(tl.float32).to(tl.bfloat16).to(tl.float32)[:, None] if ZEROS else bias


@triton.jit
def _scale(factor, ZEROS: tl.constexpr):
    return (factor & -256 if ZEROS else factor).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "tiles", "split_tiles", "groups"])
def packed_linear_kernel(
    x_ptr,  # [rows, x_stride]
    words_ptr,  # int32 [blocks, tiles, BLOCK, TILE / 2]
    factors_ptr,  # int32 [blocks, groups, FACTORS]: of BLOCK outputs, or of each
    bias_ptr,  # [outputs], or None
    y_ptr,  # [splits, rows, outputs]
    rows,
    width,
    outputs,
    tiles,
    split_tiles,
    groups,
    x_stride,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    RUN: tl.constexpr,
    FACTORS: tl.constexpr,
    ZEROS: tl.constexpr,
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
    block = tl.minimum(n // BLOCK, tl.cdiv(outputs, BLOCK) - 1).to(tl.int64)
    inside = (n % BLOCK)[:, None] * (TILE // 2) + tl.arange(0, TILE // 2)[None, :]
    words_ptr += block[:, None] * tiles * (BLOCK * TILE // 2) + inside
    factors_ptr += block * groups * FACTORS + n % FACTORS
    x_ptr += m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    first = tl.program_id(2) * split_tiles
    for tile in tl.range(first, tl.minimum(first + split_tiles, tiles), num_stages=STAGES):
        words = tl.load(words_ptr + tile * (BLOCK * TILE // 2))
        for run in tl.static_range(PARTS // RUN):
            factor = tl.load(factors_ptr + (tile * PARTS + run * RUN) // GROUP_TILES * FACTORS)
            less = _less(factor, FORM, ZEROS)
            of_run = tl.zeros([TILE_N, TILE_M], tl.float32)
            for part in tl.static_range(run * RUN, run * RUN + RUN):
                k = (tile * PARTS + part) * TILE + tl.arange(0, TILE)
                mask = mask_m[None, :] if WHOLE else mask_m[None, :] & (k < width)[:, None]
                x = tl.load(x_ptr + k[:, None], mask=mask, other=0.0)
                of_run = tl.dot(_wide(words, part, less, FORM).to(x.dtype), x, of_run, input_precision=PRECISION)
            acc += of_run * _scale(factor, ZEROS)[:, None]
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


@triton.jit(do_not_specialize=["first", "tiles", "groups"])
def packed_dense_kernel(
    words_ptr,
    factors_ptr,
    out_ptr,  # [blocks * BLOCK, width]
    first,  # block
    width,
    tiles,
    groups,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    FACTORS: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Program (tile, block)."""
    tile, n = tl.program_id(0), tl.arange(0, BLOCK)
    block = (first + tl.program_id(1)).to(tl.int64)
    inside = n[:, None] * (TILE // 2) + tl.arange(0, TILE // 2)[None, :]
    words = tl.load(words_ptr + (block * tiles + tile) * (BLOCK * TILE // 2) + inside)
    out_ptr += (tl.program_id(1).to(tl.int64) * BLOCK + n)[:, None] * width
    for part in tl.static_range(PARTS):
        at = tile * PARTS + part
        factor = tl.load(factors_ptr + (block * groups + at // GROUP_TILES) * FACTORS + n % FACTORS)
        wide = _wide(words, part, _less(factor, FORM, ZEROS), FORM).to(tl.float32) * _scale(factor, ZEROS)[:, None]
        k = at * TILE + tl.arange(0, TILE)
        tl.store(out_ptr + k[None, :], wide.to(out_ptr.dtype.element_ty), mask=(k < width)[None, :])


class PackedLinear:
    """y = x W^T + b; `weight_fits` accepted `weight` [out, in], which is dropped."""

    def __init__(self, weight: Integers, bias: Tensor | None) -> None:
        self._outputs, self._width = weight.shape
        self._bias = bias
        self._constants = _constants(weight)
        parts = self._constants["PARTS"]
        self._words = _words(_numbers(weight), parts, self._constants["TILE"])
        self._tiles = self._words.shape[1]
        self._factors = _factors(weight, -(-self._tiles * parts // self._constants["GROUP_TILES"]))
        self._constants["FACTORS"] = self._factors.shape[2]
        blocks, splits = len(self._words), 1
        while blocks * splits < PROGRAMS and self._tiles >= 2 * splits * SPLIT_TILES:
            splits *= 2
        self._split_tiles = -(-self._tiles // splits)

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
        rows, constants = len(x), product_constants(self._constants, len(x), self._width, x.dtype)
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
                **self._constants,
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


def product_constants(matrix: dict[str, Any], rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of a matrix and the launch for `rows`."""
    tile_m, tile_n, warps, stages = (64, 128, 8, 4) if rows > 32 else (32 if rows > 16 else 16, 64, 4, 5)
    return {
        **matrix,
        "RUN": math.gcd(matrix["PARTS"], matrix["GROUP_TILES"]),
        "WHOLE": width % (matrix["PARTS"] * matrix["TILE"]) == 0,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "STAGES": stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": warps,
        "num_stages": stages,
    }


# ---- The layout.


def weight_fits(weight: Integers) -> bool:
    """True for groups of whole tiles, with integers as zero points."""
    groups_fit = weight.scales.shape[1] == 1 or weight.group % 32 == 0
    return groups_fit and (weight.offsets is None or _zeros(weight) is not None)


def _constants(weight: Integers) -> dict[str, Any]:
    one_group = weight.scales.shape[1] == 1
    tile = TILE if one_group or weight.group % TILE == 0 else TILE // 2
    return {
        "FORM": "e2m1" if weight.e2m1 else "e4m3" if weight.is_float else f"int{weight.bits}",
        "PARTS": 16 // weight.bits,
        "TILE": tile,
        "BLOCK": BLOCK,
        "GROUP_TILES": ONE_GROUP if one_group else weight.group // tile,
        "ZEROS": weight.offsets is not None,
    }


def _numbers(weight: Integers) -> Tensor:
    """Bits, [out, in] uint8."""
    return (weight.values + 8 if weight.bits == 4 else weight.values).view(torch.uint8)


def _words(numbers: Tensor, parts: int, tile: int) -> Tensor:
    """Return int32 [blocks, tiles, BLOCK, tile / 2]."""
    down, across = (-size % step for size, step in zip(numbers.shape, (BLOCK, parts * tile), strict=True))
    runs = functional.pad(numbers, (0, across, 0, down)).view(-(-len(numbers) // BLOCK), BLOCK, -1, parts, tile)
    halves = runs[:, :, :, 0].to(torch.int16)
    for part in range(1, parts):
        halves |= runs[:, :, :, part].to(torch.int16) << 16 // parts * part
    return halves.transpose(1, 2).contiguous().view(torch.int32)


def _factors(weight: Integers, groups: int) -> Tensor:
    """Return int32 [blocks, groups, 1 or BLOCK]: bits of fp32 scales.

    A zero point, plus 128, is the last byte.
    """
    bits = weight.scales.view(torch.int32)
    if (zeros := _zeros(weight)) is not None:
        bits = bits | zeros + 128
    bits = torch.cat([bits, bits[-1:].expand(-len(bits) % BLOCK, -1)])
    bits = functional.pad(bits, (0, groups - bits.shape[1])).view(-1, BLOCK, groups).transpose(1, 2)
    return (bits[..., :1] if bool((bits == bits[..., :1]).all()) else bits).contiguous()


def _zeros(weight: Integers) -> Tensor | None:
    """Return int32 [out, groups]: bytes for which all scales have room."""
    if weight.offsets is None:
        return None
    zeros = (weight.offsets / -weight.scales).nan_to_num().round().clamp(-128, 127)
    fits = (weight.offsets == zeros * -weight.scales) & (weight.scales.view(torch.int32) & 0xFF == 0)
    return zeros.to(torch.int32) if bool(fits.all()) else None
