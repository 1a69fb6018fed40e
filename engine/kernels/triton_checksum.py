# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Sums of mixed words of KV pages (engine/kv/page_checksum.py) in one pass over them (GPU; never run on one yet)."""

import torch
import triton
import triton.language as tl

from engine.kv.splitmix import GOLDEN, MUL_1, MUL_2

TILE = 2048  # words
SPAN = 32768  # words of a page that a program reads


@triton.jit
def page_sums_kernel(
    words_ptr,  # [pages, WORDS] int64
    pages_ptr,  # [n] int64
    sums_ptr,  # [n] int64, zero before
    WORDS: tl.constexpr,
    ODD: tl.constexpr,
    MUL_1: tl.constexpr,
    MUL_2: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (page, span): sums of 64 bits are exact in any order."""
    page = tl.load(pages_ptr + tl.program_id(0))
    begin = tl.program_id(1) * SPAN
    total = tl.zeros([TILE], tl.uint64)
    for at in range(begin, tl.minimum(begin + SPAN, WORDS), TILE):
        i = at + tl.arange(0, TILE)
        mask = i < WORDS
        x = tl.load(words_ptr + page * WORDS + i, mask=mask, other=0).to(tl.uint64, bitcast=True)
        x += (i + 1).to(tl.uint64) * ODD
        x = (x ^ (x >> 30)) * MUL_1
        x = (x ^ (x >> 27)) * MUL_2
        x ^= x >> 31
        total += tl.where(mask, x, 0)
    tl.atomic_add(sums_ptr + tl.program_id(0), tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def page_sums(words: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[n] int64: for each of `pages` [n] int64 the sum over i of mix(words[page, i] + (i + 1) * GOLDEN), modulo 2^64.

    words [pages, words of a page] int64, dense.
    """
    sums = torch.zeros(len(pages), dtype=torch.int64, device=words.device)
    page_sums_kernel[(len(pages), triton.cdiv(words.shape[1], SPAN))](
        words, pages, sums, **sums_constants(words.shape[1]), num_warps=8
    )
    return sums


def sums_constants(words: int) -> dict[str, int]:
    return {"WORDS": words, "ODD": GOLDEN, "MUL_1": MUL_1, "MUL_2": MUL_2, "TILE": TILE, "SPAN": SPAN}
