"""Blocks of ggml's tensor types as integers, in groups of 32. Types of other groups (Q6_K has 16) are not among them.

Source: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.integers import Integers, stacked

GROUP = 32
ROWS_AT_ONCE = 4096  # that lie unpacked beside the matrix

Parts = tuple[Tensor, Tensor, Tensor | None]  # values [rows, inputs], scales and offsets [rows, groups]


@dataclass(frozen=True, slots=True)
class BlockType:
    """`bits`: of the integers in memory. `read`: from blocks [rows, n, bytes] uint8."""

    bits: int
    read: Callable[[Tensor], Parts]


def integers_of(kind: BlockType, blocks: Tensor, dtype: torch.dtype) -> Integers:
    """The values of whole rows of `blocks` [rows, n, bytes] uint8: in fp32 those that ggml computes."""
    return stacked([_integers(kind, some, dtype) for some in torch.split(blocks, ROWS_AT_ONCE)])


def _integers(kind: BlockType, blocks: Tensor, dtype: torch.dtype) -> Integers:
    values, scales, offsets = kind.read(blocks)
    return Integers(values, scales, offsets, kind.bits, GROUP, dtype)


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[..., 2:]) - 8, _halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    scales, least = _halves(blocks, 0), _halves(blocks, 1)
    return _nibbles(blocks[..., 4:]) - 8, scales, least + 8 * scales


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0), None


def _q4_k(blocks: Tensor) -> Parts:
    scales, least = _k_factors(blocks)
    return _nibbles(_runs(blocks[..., 16:])) - 8, scales, least + 8 * scales


def _q5_k(blocks: Tensor) -> Parts:
    scales, least = _k_factors(blocks)
    low = _nibbles(_runs(blocks[..., 48:]))
    high = torch.stack([blocks[..., 16:48] >> group & 1 for group in range(8)], dim=2).view(torch.int8)
    return low + 16 * high.flatten(1), scales, least


def _halves(blocks: Tensor, index: int) -> Tensor:
    """[rows, n] fp32: number `index` of the fp16 at the start of each block."""
    return blocks[..., 2 * index : 2 * index + 2].contiguous().view(torch.float16)[..., 0].float()


def _runs(data: Tensor) -> Tensor:
    """[rows, n, runs, 32] of `data` [rows, n, bytes]."""
    return data.reshape(*data.shape[:2], -1, GROUP)


def _nibbles(runs: Tensor) -> Tensor:
    """[rows, ...] int8 of 0 to 15: of each run of bytes (the last axis) the low halves, then the high ones."""
    return torch.stack([runs & 15, runs >> 4], dim=-2).view(torch.int8).flatten(1)


def _k_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values, [rows, groups]: two of 6 bits for each of the 8 groups of a block, times the block's two."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], dim=2)
    least = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=2)
    return (_halves(blocks, 0)[..., None] * scales).flatten(1), (-_halves(blocks, 1)[..., None] * least).flatten(1)


BLOCK_TYPES = {
    "Q4_0": BlockType(4, _q4_0),
    "Q4_1": BlockType(4, _q4_1),
    "Q8_0": BlockType(8, _q8_0),
    "Q4_K": BlockType(4, _q4_k),
    "Q5_K": BlockType(8, _q5_k),
}
