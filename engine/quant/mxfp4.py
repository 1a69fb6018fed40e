"""MXFP4 of gpt-oss: blocks of 32 4-bit values with a power of two as scale.

Source: Open Compute Project, "Microscaling Formats (MX) Specification" 1.0.
"""

import torch

from engine.quant.integers import E2M1, Integers

BLOCK = 32  # values that share a scale
BIAS = 127
NAN_SCALE = 255


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """[..., n * 32] in `dtype` from `blocks` [..., n, 16] uint8, low nibble first.

    `scales` [..., n] uint8 are exponents plus 127 (255: NaN).
    """
    assert blocks.dtype == scales.dtype == torch.uint8, (blocks.dtype, scales.dtype)
    assert blocks.shape == (*scales.shape, BLOCK // 2), (blocks.shape, scales.shape)
    both = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    values = torch.stack([both[(blocks & 15).long()], both[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (values * _powers(scales)[..., None]).to(dtype).flatten(-2)


def mxfp4_codes(blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype) -> Integers:
    """A matrix of `blocks` [rows, n, 16], `scales` [rows, n], still packed."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(torch.int8) - 8
    return Integers(codes.flatten(1), _powers(scales), None, 4, BLOCK, dtype, e2m1=True)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - BIAS)
    return powers.masked_fill_(scales == NAN_SCALE, torch.nan)
