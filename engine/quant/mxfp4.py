"""MXFP4, the microscaling format of gpt-oss: blocks of 32 values of 4 bits share a scale, a power of two.

Source: Open Compute Project, "Microscaling Formats (MX) Specification" 1.0: elements E2M1, scales E8M0.
"""

import torch

BLOCK = 32  # values that share a scale
BIAS = 127
NAN_SCALE = 255

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """[..., n * 32] in `dtype`: the values of `blocks` [..., n, 16] uint8, two in a byte, the low nibble first, times two to the
    power of `scales` [..., n] uint8 minus 127 (255: NaN).
    """
    assert blocks.dtype == scales.dtype == torch.uint8, (blocks.dtype, scales.dtype)
    assert blocks.shape == (*scales.shape, BLOCK // 2), (blocks.shape, scales.shape)
    both = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=blocks.device)
    values = torch.stack([both[(blocks & 15).long()], both[(blocks >> 4).long()]], dim=-1).flatten(-2)
    scaled = torch.ldexp(values, (scales.to(torch.int32) - BIAS)[..., None])
    return scaled.masked_fill((scales == NAN_SCALE)[..., None], torch.nan).to(dtype).flatten(-2)
