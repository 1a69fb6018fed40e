# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Fp8, int8, int4 and MXFP4 matrices that stay packed in a GPU's memory, widened in registers.

Numbers are interleaved as in Marlin (arXiv:2408.11743). A row has the same bits in any batch.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.quant.integers import Integers, Weight

BLOCK = 64  # outputs of a stored tile
BLOCK_N = tl.constexpr(BLOCK)
TILE = 64  # inputs of one part of a word tile; 32 where groups are so
ONE_GROUP = 1 << 20  # more tiles than a matrix has


class PackedForm(NamedTuple):
    """A layout of packed matrices, for kernels.

    `zeros`: "": a group has a scale; "points": its last byte is the zero point plus 128; "offsets":
    a scale, then an offset. In MXFP4 a word has the exponents of four groups.
    """

    numbers: str  # "e4m3", "e2m1", "int4" or "int8"
    parts: int  # numbers in half a word
    tile: int  # inputs of one part of a word tile
    group_tiles: int
    zeros: str
    each: int  # outputs with factors of their own: all (BLOCK), every other one (2), or one of a block

    @property
    def inputs(self) -> int:
        return self.parts * self.tile

    @property
    def run(self) -> int:
        return math.gcd(self.parts, self.group_tiles)

    @property
    def is_scaled(self) -> bool:
        """Numbers are scaled, in place of sums: where groups are short, or have offsets."""
        return self.numbers == "e2m1" or self.zeros == "offsets"

    def factors(self, tiles: int) -> int:
        groups = tiles if self.numbers == "e2m1" else -(-tiles * self.parts // self.group_tiles)
        return 2 * groups if self.zeros == "offsets" else groups


@triton.jit
def _wide(words, part: tl.constexpr, less, FORM: tl.constexpr):
    """Part `part` of words [n, k] as fp32 [n, 2 k] that bfloat16 holds exactly, minus `less`."""
    # a word is two halves of 16 bits, each with a number of every part; bfloat16's 0x4300 is 128, and its last bit 1;
    # LLVM narrows the fp32 steps to bfloat16, two a register
    if FORM.numbers == "e4m3":  # exponent and mantissa in their places: 2**-120 of the number
        both = words if part else words << 8
        wide = _halves((both & -0x7FFF8000) | ((both >> 4) & 0x07F007F0)) * 2.0**120
    elif FORM.numbers == "e2m1":  # the same
        both = words >> 4 * part
        wide = _halves(((both & 0x00080008) << 12) | ((both & 0x00070007) << 6)) * 2.0**126
    elif FORM.numbers == "int4":
        wide = _halves((words >> 4 * part & 0x000F000F) | 0x43004300) - less
    else:  # a number of 7 bits, less 128 where the eighth is set
        both = words >> 8 * part
        wide = _halves((both & 0x007F007F) | 0x43004300) - _halves((both & 0x00800080) | 0x43004300)
        wide = wide.to(tl.bfloat16).to(tl.float32) - less
    return wide.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _halves(words):
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1]).to(tl.float32)


@triton.jit
def _factor(factors, tile, run: tl.constexpr, FORM: tl.constexpr):
    """Bits of scales, and offsets [n], of a tile's run `run`; pointers [n]."""
    if FORM.numbers == "e2m1":
        factor = (tl.load(factors + tile * FORM.each) >> 8 * run & 0xFF) << 23
        offset = factor
    else:
        group = (tile * FORM.parts + run * FORM.run) // FORM.group_tiles * FORM.each
        if FORM.zeros == "offsets":
            factor = tl.load(factors + 2 * group)
            offset = tl.load(factors + 2 * group + FORM.each)
        else:
            factor = tl.load(factors + group)
            offset = factor
    return factor, offset.to(tl.float32, bitcast=True)


@triton.jit
def _less(factor, FORM: tl.constexpr):
    """Zero points [n, 1], or their constant."""
    bias: tl.constexpr = 136 if FORM.numbers == "int4" else 0
    zeros = ((factor & 0xFF) + (bias - 128)).to(tl.float32).to(tl.bfloat16).to(tl.float32)[:, None]
    return zeros if FORM.zeros == "points" else bias


@triton.jit
def _scale(factor, FORM: tl.constexpr):
    return (factor & -256 if FORM.zeros == "points" else factor).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _scaled(wide, factor, offset, FORM: tl.constexpr):
    scale = _scale(factor, FORM)
    if FORM.numbers == "e2m1":  # bfloat16 holds powers of two, and these products
        scale = scale.to(tl.bfloat16).to(tl.float32)
    scaled = wide * scale
    return scaled + offset[:, None] if FORM.zeros == "offsets" else scaled


@triton.jit
def packed_places(words_ptr, factors_ptr, n, outputs, tiles, factors, FORM: tl.constexpr):
    """Pointers to the first words [n, tile / 2] and factors [n] of outputs `n`."""
    block = tl.minimum(n // BLOCK_N, tl.cdiv(outputs, BLOCK_N) - 1).to(tl.int64)
    inside = (n % BLOCK_N)[:, None] * (FORM.tile // 2) + tl.arange(0, FORM.tile // 2)[None, :]
    words_ptr += block[:, None] * tiles * (BLOCK_N * FORM.tile // 2) + inside
    return words_ptr, factors_ptr + block * factors * FORM.each + n % FORM.each


@triton.jit
def packed_sums(
    x,  # pointers [rows], to input 0
    mask_rows,
    words,  # of `packed_places`
    factors,
    first,  # tile
    end,
    width,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return fp32 [n, rows], summed in the order of inputs."""
    acc = tl.zeros([words.shape[0], x.shape[0]], tl.float32)
    for tile in tl.range(first, end, num_stages=STAGES):  # so factors are loaded ahead, too
        packed = tl.load(words + tile * (BLOCK_N * FORM.tile // 2))
        for run in tl.static_range(FORM.parts // FORM.run):
            factor, offset = _factor(factors, tile, run, FORM)
            less = _less(factor, FORM)
            sums = acc if FORM.is_scaled else tl.zeros_like(acc)
            for part in tl.static_range(run * FORM.run, run * FORM.run + FORM.run):
                k = (tile * FORM.parts + part) * FORM.tile + tl.arange(0, FORM.tile)
                mask = mask_rows[None, :] if WHOLE else mask_rows[None, :] & (k < width)[:, None]
                rows = tl.load(x[None, :] + k[:, None], mask=mask, other=0.0)
                wide = _wide(packed, part, less, FORM)
                wide = _scaled(wide, factor, offset, FORM) if FORM.is_scaled else wide
                sums = tl.dot(wide.to(rows.dtype), rows, sums, input_precision=PRECISION)
            acc = sums if FORM.is_scaled else acc + sums * _scale(factor, FORM)
    return acc


@triton.jit(do_not_specialize=["first", "tiles", "factors"])
def packed_dense_kernel(
    words_ptr,
    factors_ptr,
    out_ptr,  # [blocks * BLOCK, width]
    first,  # block
    width,
    tiles,
    factors,
    FORM: tl.constexpr,
):
    """Program (tile, block)."""
    tile, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    of_block = (first + tl.program_id(1)) * BLOCK_N + n
    outputs = (first + tl.num_programs(1)) * BLOCK_N
    words, factors = packed_places(words_ptr, factors_ptr, of_block, outputs, tiles, factors, FORM)
    packed = tl.load(words + tile * (BLOCK_N * FORM.tile // 2))
    out_ptr += (tl.program_id(1).to(tl.int64) * BLOCK_N + n)[:, None] * width
    PARTS: tl.constexpr = FORM.parts
    for part in tl.static_range(PARTS):
        factor, offset = _factor(factors, tile, part // FORM.run, FORM)
        wide = _scaled(_wide(packed, part, _less(factor, FORM), FORM), factor, offset, FORM)
        k = (tile * FORM.parts + part) * FORM.tile + tl.arange(0, FORM.tile)
        tl.store(out_ptr + k[None, :], wide.to(out_ptr.dtype.element_ty), mask=(k < width)[None, :])


# ---- The layout.


class Stack(NamedTuple):
    """Matrices [count, out, in]: dense, or packed in one form."""

    weight: Tensor  # packed: int32 [count, blocks, tiles, BLOCK, tile / 2]
    factors: Tensor | None  # int32 [count, blocks, factors of an output, each]
    shape: tuple[int, int, int]
    form: PackedForm | None


def weight_fits(weight: Integers) -> bool:
    """True for groups of whole tiles."""
    return weight.e2m1 or weight.scales.shape[1] == 1 or weight.group % (TILE // 2) == 0


def packed(matrices: list[Weight], *, inputs: int, alternates: bool = False) -> Stack | None:
    """Pack matrices and empty the list; None if one does not fit, or they differ in form.

    `inputs`: of a word tile, at most. `alternates`: outputs of the first and the second half.
    """
    found = [matrix for matrix in reversed(matrices) if isinstance(matrix, Integers) and weight_fits(matrix)]
    if len(found) < len(matrices) or len({matrix.kind for matrix in found}) > 1:
        return None
    matrices.clear()
    count, shape, form = len(found), found[0].shape, _form(found, inputs)
    tiles = -(-shape[1] // form.inputs)
    words, factors = torch.empty(0), []
    for place in range(count):
        matrix = found.pop()
        numbers, bits = _numbers(matrix), _bits(matrix, form, form.factors(tiles))
        if alternates:
            numbers, bits = (_alternating(rows) for rows in (numbers, bits))
        own = _words(numbers, form)
        words = words if place else own.new_empty((count, *own.shape))
        words[place] = own
        factors.append(torch.cat([bits, bits[-1:].expand(-len(bits) % BLOCK, -1)]))
    stack = torch.stack(factors).view(count, -1, BLOCK, factors[0].shape[1])
    each = next(each for each in (1, 2, BLOCK) if torch.equal(stack[:, :, each:], stack[:, :, : BLOCK - each]))
    factors_of = stack[:, :, :each].transpose(2, 3).contiguous()
    return Stack(words, factors_of, (count, *shape), form._replace(each=each))


def _form(matrices: list[Integers], inputs: int) -> PackedForm:
    weight = matrices[0]
    one_group, parts = weight.scales.shape[1] == 1, 16 // weight.bits
    tile = TILE if not weight.e2m1 and (one_group or weight.group % TILE == 0) else TILE // 2
    tile = min(tile, inputs // parts)
    zeros = ""
    if any(matrix.offsets is not None for matrix in matrices):
        zeros = "points" if all(_zeros(matrix) is not None for matrix in matrices) else "offsets"
    return PackedForm(
        numbers="e2m1" if weight.e2m1 else "e4m3" if weight.is_float else f"int{weight.bits}",
        parts=parts,
        tile=tile,
        group_tiles=1 if weight.e2m1 else ONE_GROUP if one_group else weight.group // tile,
        zeros=zeros,
        each=BLOCK,
    )


def _alternating(rows: Tensor) -> Tensor:
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _numbers(weight: Integers) -> Tensor:
    """Bits, [out, in] uint8."""
    return (weight.values + 8 if weight.bits == 4 else weight.values).view(torch.uint8)


def _words(numbers: Tensor, form: PackedForm) -> Tensor:
    """Return int32 [blocks, tiles, BLOCK, tile / 2]."""
    parts, blocks = form.parts, -(-len(numbers) // BLOCK)
    down, across = (-size % step for size, step in zip(numbers.shape, (BLOCK, form.inputs), strict=True))
    runs = functional.pad(numbers, (0, across, 0, down)).view(blocks, BLOCK, -1, parts, form.tile)
    halves = runs[:, :, :, 0].to(torch.int16)
    for part in range(1, parts):
        halves |= runs[:, :, :, part].to(torch.int16) << 16 // parts * part
    return halves.transpose(1, 2).contiguous().view(torch.int32)


def _bits(weight: Integers, form: PackedForm, count: int) -> Tensor:
    """Return `count` factors of each output as int32 [out, count]."""
    bits = weight.scales.view(torch.int32)
    if weight.e2m1:  # 2**-127 becomes 0, and NaN infinite
        exponents = functional.pad(bits >> 23 & 0xFF, (0, 4 * count - bits.shape[1]))
        return functools.reduce(torch.bitwise_or, (exponents[:, part::4] << 8 * part for part in range(4)))
    if form.zeros == "points":
        points = _zeros(weight)
        assert points is not None, "asked for the form"
        bits = bits | points + 128
    elif form.zeros == "offsets":
        offsets = torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
        bits = torch.stack([bits, offsets.view(torch.int32)], dim=2).flatten(1)
    return functional.pad(bits, (0, count - bits.shape[1]))


def _zeros(weight: Integers) -> Tensor | None:
    """Return int32 [out, groups]: bytes for which all scales have room."""
    if bool((weight.scales.view(torch.int32) & 0xFF).any()):
        return None
    if weight.offsets is None:
        return torch.zeros_like(weight.scales, dtype=torch.int32)
    zeros = (weight.offsets / -weight.scales).nan_to_num().round().clamp(-128, 127)
    return zeros.to(torch.int32) if torch.equal(weight.offsets, zeros * -weight.scales) else None
