# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Codes and exponents of fp8 KV (engine/kv/fp8.py) in kernels.

A power of two times sums of products with codes equals the sums of products with values, to the
bit: exponents join scores and weights, one factor a token, and codes are operands as they are.
"""

import triton
import triton.language as tl

from engine.kv import fp8

MIN_EXPONENT = tl.constexpr(fp8.MIN_EXPONENT)
BAD_EXPONENT = tl.constexpr(fp8.BAD_EXPONENT)
BAD_CODE = tl.constexpr(fp8.BAD_CODE)
LARGEST_MANTISSA = tl.constexpr(fp8.LARGEST_MANTISSA)
REVERSED = tl.constexpr(2 * fp8.BIAS)
INFINITE = tl.constexpr(0x7F800000)  # fp32's bits


@triton.jit
def values_of(codes, dtype: tl.constexpr):
    """Values of uint8 codes, without their scale."""
    # by way of fp16, which one instruction makes of two codes; from there to bf16 at once is eight times slower
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)


@triton.jit
def factors_of(exponents):
    """fp32 scales of exponents of any integer type."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """Bits of |x|, int32, which order like numbers; those of NaN are largest."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponents_of(largest):
    """Exponents, int32, of rows whose largest `magnitude` this is."""
    exponents = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > LARGEST_MANTISSA).to(tl.int32)
    exponents = tl.where(exponents < MIN_EXPONENT, MIN_EXPONENT, exponents)
    return tl.where(largest >= INFINITE, BAD_EXPONENT, exponents)


@triton.jit
def codes_of(x, largest):
    """uint8 codes of x in rows whose largest `magnitude` this is, of a shape that fits x."""
    scaled = x.to(tl.float32) * factors_of(-exponents_of(largest) + REVERSED)
    codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(largest >= INFINITE, BAD_CODE, codes).to(tl.uint8)
