"""ggml blocks as integers in groups of 32 (not Q6_K, which has 16).

Source: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.integers import Integers, stacked

GROUP = 32
ROWS_AT_ONCE = 4096  # unpacked at once

Parts = tuple[Tensor, Tensor, Tensor | None]  # values [rows, inputs], scales and offsets [rows, groups]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF. `bits`: in memory. `read`: from blocks [rows, n, bytes] uint8."""

    bits: int
    read: Callable[[Tensor], Parts]


def integers_of(kind: BlockType, blocks: Tensor, dtype: torch.dtype) -> Integers:
    """Values of `blocks` [rows, n, bytes] uint8, equal to ggml's in fp32."""
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
    return blocks[..., 2 * index : 2 * index + 2].contiguous().view(torch.float16)[..., 0].float()


def _runs(data: Tensor) -> Tensor:
    return data.reshape(*data.shape[:2], -1, GROUP)


def _nibbles(runs: Tensor) -> Tensor:
    """[rows, ...] int8, 0 to 15: low nibbles of each segment of bytes, then high ones."""
    return torch.stack([runs & 15, runs >> 4], dim=-2).view(torch.int8).flatten(1)


def _k_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [rows, groups]: 6 bits each for 8 groups, times two fp16 per block."""
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
