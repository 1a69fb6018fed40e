"""KV of 8 bits: a row of K or V (one token, one KV head) is e4m3 codes and one exponent, that of its scale.

    x[i] is about value(code[i]) * 2 ** (exponent - 127),   e4m3 as in torch.float8_e4m3fn (arXiv:2209.05433)

A scale is the least power of two by which the row fits: the product is exact, in bf16 too, so that every reader has the same
values, and codes are floating numbers, which lose nothing by such a scale. Mirrored by engine/kernels/fp8.h, bit for bit.
"""

import torch

BIAS = 127  # of fp32's exponents
LEAST_EXPONENT = 32  # of a row of zeros too: below it products with codes would be denormal
BAD_EXPONENT = (
    247  # of a row that is not finite: its codes are NaN, and the kernels' integer arithmetic makes NaN of them, too
)
BAD_CODE = 0x7F
CODE = torch.float8_e4m3fn
_LARGEST_MANTISSA = 0x600000  # of 1.75 * 2^8, the largest value, in fp32


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., dim] and exponents [...], both uint8, of x [..., dim]."""
    x = x.float()
    bits = x.abs().amax(-1).view(torch.int32)
    bad = bits >= 0x7F800000
    exponents = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > _LARGEST_MANTISSA)).clamp(LEAST_EXPONENT, BAD_EXPONENT)
    exponents = exponents.masked_fill(bad, BAD_EXPONENT)
    codes = (x * _power_of_two(2 * BIAS - exponents)).to(CODE).view(torch.uint8)
    return codes.masked_fill(bad.unsqueeze(-1), BAD_CODE), exponents.to(torch.uint8)


def dequantized(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., dim] of `dtype`, exact."""
    return (codes.view(CODE).float() * _power_of_two(exponents.to(torch.int32))).to(dtype)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """[..., 1] fp32 of exponents [...] int32, from 1 to 254."""
    return (exponents << 23).view(torch.float32).unsqueeze(-1)
