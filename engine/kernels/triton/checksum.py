# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Sums of mixed words (engine/kv/page_checksum.py) on GPU; never run on one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kv import page_checksum

_MUL_1, _MUL_2 = tl.constexpr(page_checksum.MUL_1), tl.constexpr(page_checksum.MUL_2)
TILE = 2048  # words
SPAN = 32768  # words per program
LINE = 8  # words of 8 bytes are units', which begin at a cache line


@triton.jit
def word_sums_kernel(
    words_ptr,  # int64, int32 or int16
    starts_ptr,  # [n] int64
    keys_ptr,  # [n] int64
    bits_ptr,  # [PERIOD] int64; PERIOD 0: none
    sums_ptr,  # [n] int64, zero before
    STEP: tl.constexpr,
    COUNT: tl.constexpr,  # words of a row
    PERIOD: tl.constexpr,
    ALIGN: tl.constexpr,  # divides starts
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (row, span); sums of 64 bits are exact in any order."""
    start = tl.multiple_of(tl.load(starts_ptr + tl.program_id(0)), ALIGN)
    key = tl.load(keys_ptr + tl.program_id(0)).to(tl.uint64, bitcast=True)
    begin = tl.program_id(1) * SPAN
    total = tl.zeros([TILE], tl.uint64)
    for at in range(begin, tl.minimum(begin + SPAN, COUNT), TILE):
        i = at + tl.arange(0, TILE)
        mask = i < COUNT
        x = tl.load(words_ptr + start + i, mask=mask, other=0).to(tl.int64)
        if PERIOD:
            x &= tl.load(bits_ptr + i % PERIOD, mask=mask, other=0)
        x = x.to(tl.uint64, bitcast=True) + key + (i + 1).to(tl.uint64) * STEP
        x = (x ^ (x >> 30)) * _MUL_1
        x = (x ^ (x >> 27)) * _MUL_2
        x ^= x >> 31
        total += tl.where(mask, x, 0)
    tl.atomic_add(sums_ptr + tl.program_id(0), tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def triton_sums(
    words: Tensor, starts: Tensor, keys: Tensor, count: int, step: int, bits: Tensor | None = None
) -> Tensor:
    """`page_checksum.word_sums` in one launch."""
    sums = torch.zeros_like(starts)
    constants = sums_constants(count, step, word_bytes=words.itemsize, period=0 if bits is None else len(bits))
    if len(starts):
        grid = (len(starts), triton.cdiv(count, SPAN))
        word_sums_kernel[grid](words, starts, keys, starts if bits is None else bits, sums, **constants, num_warps=8)
    return sums


def sums_constants(count: int, step: int, *, word_bytes: int = 8, period: int = 0) -> dict[str, int]:
    how = {"STEP": step % (1 << 64), "COUNT": count, "PERIOD": period, "ALIGN": LINE if word_bytes == 8 else 1}
    return {**how, "TILE": TILE, "SPAN": SPAN}
