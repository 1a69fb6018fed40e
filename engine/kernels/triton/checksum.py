# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Checksums of KV page units (engine/kv/page_checksum.py) on GPU; never run on one."""

import torch
import triton
import triton.language as tl

from engine.kv.page_checksum import GOLDEN, MUL_1, MUL_2

TILE = 2048  # words
SPAN = 32768  # words per program


@triton.jit
def page_sums_kernel(
    words_ptr,  # [rows, WORDS] int64
    rows_ptr,  # [n] int64
    keys_ptr,  # [n] int64
    sums_ptr,  # [n] int64, zero before
    WORDS: tl.constexpr,
    COUNT: tl.constexpr,  # words of a row in the sum
    ODD: tl.constexpr,
    MUL_1: tl.constexpr,
    MUL_2: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (row, span); sums of 64 bits are exact in any order."""
    row = tl.load(rows_ptr + tl.program_id(0))
    key = tl.load(keys_ptr + tl.program_id(0)).to(tl.uint64, bitcast=True)
    begin = tl.program_id(1) * SPAN
    total = tl.zeros([TILE], tl.uint64)
    for at in range(begin, tl.minimum(begin + SPAN, COUNT), TILE):
        i = at + tl.arange(0, TILE)
        mask = i < COUNT
        x = tl.load(words_ptr + row * WORDS + i, mask=mask, other=0).to(tl.uint64, bitcast=True)
        x += key + (i + 1).to(tl.uint64) * ODD
        x = (x ^ (x >> 30)) * MUL_1
        x = (x ^ (x >> 27)) * MUL_2
        x ^= x >> 31
        total += tl.where(mask, x, 0)
    tl.atomic_add(sums_ptr + tl.program_id(0), tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def page_sums(words: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return int64[n], per row the sum of mix(words[row, i] + key + (i + 1) * GOLDEN), i < count.

    words int64[rows, words of a row], dense; sums are modulo 2^64.
    """
    sums = torch.zeros(len(rows), dtype=torch.int64, device=words.device)
    constants = sums_constants(words.shape[1], count)
    page_sums_kernel[(len(rows), triton.cdiv(count, SPAN))](words, rows, keys, sums, **constants, num_warps=8)
    return sums


def sums_constants(words: int, count: int) -> dict[str, int]:
    return {"WORDS": words, "COUNT": count, "ODD": GOLDEN, "MUL_1": MUL_1, "MUL_2": MUL_2, "TILE": TILE, "SPAN": SPAN}
