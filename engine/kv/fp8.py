"""FP8 KV: per token and KV head, e4m3 codes and one exponent.

  x[i] is about value(code[i]) * 2 ** (exponent - 127)

e4m3 as in torch.float8_e4m3fn (arXiv:2209.05433). The scale is the smallest power of two that fits:
products are exact, in bf16 too, so all readers have the same values. engine/kernels/csrc/fp8.h
and engine/kernels/triton/fp8.py mirror the bits.
"""

import torch

BIAS = 127  # of fp32 exponents
MIN_EXPONENT = 32  # also for a row of zeros: below it products with codes would be denormal
BAD_EXPONENT = 247  # rows that are not finite: codes are NaN, and stay NaN in the kernels' integer arithmetic
BAD_CODE = 0x7F
CODE = torch.float8_e4m3fn
LARGEST_MANTISSA = 0x600000  # of 1.75 * 2^8, the largest value, in fp32


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [..., dim] and exponents [...]."""
    x = x.float()
    bits = x.abs().amax(-1).view(torch.int32)
    bad = bits >= 0x7F800000
    exponents = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > LARGEST_MANTISSA)).clamp(MIN_EXPONENT, BAD_EXPONENT)
    exponents = exponents.masked_fill(bad, BAD_EXPONENT)
    codes = (x * _power_of_two(2 * BIAS - exponents)).to(CODE).view(torch.uint8)
    return codes.masked_fill(bad.unsqueeze(-1), BAD_CODE), exponents.to(torch.uint8)


def dequantized(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exact values [..., dim]."""
    return (codes.view(CODE).float() * _power_of_two(exponents.to(torch.int32))).to(dtype)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents << 23).view(torch.float32).unsqueeze(-1)
