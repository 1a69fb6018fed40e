# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Sampling arithmetic on GPU: fixed_math.py and engine/sampler/sampling.py, step by step.

Callers compile without fused multiply-adds, for a CPU's bits.
"""

import triton
import triton.language as tl

from engine.kernels import fixed_math
from engine.kv import page_checksum

_GOLDEN, _MUL_1, _MUL_2 = (tl.constexpr(x) for x in (page_checksum.GOLDEN, page_checksum.MUL_1, page_checksum.MUL_2))
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(x) for x in fixed_math.LOG_POLYNOMIAL)
_E0, _E1, _E2, _E3, _E4, _E5 = (tl.constexpr(x) for x in fixed_math.EXP_POLYNOMIAL)
_SQRT_HALF_BITS = tl.constexpr(fixed_math.SQRT_HALF_BITS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(fixed_math.LN2_HIGH), tl.constexpr(fixed_math.LN2_LOW)
_LOG2_E, _ROUNDER = tl.constexpr(fixed_math.LOG2_E), tl.constexpr(fixed_math.ROUNDER)
_POWER_OFFSET = tl.constexpr(fixed_math.ROUNDER_BITS - 127)
_MIN_EXPONENT, _MASS_UNITS = tl.constexpr(fixed_math.MIN_EXPONENT), tl.constexpr(fixed_math.MASS_UNITS)
_WORD = tl.constexpr(2.0**-32)


@triton.jit
def _log_of_sum(fraction, exponent):
    square = fraction * fraction
    y = fraction * _L0 + _L1
    y = y * fraction + _L2
    y = y * fraction + _L3
    y = y * fraction + _L4
    y = y * fraction + _L5
    y = y * fraction + _L6
    y = y * fraction + _L7
    y = y * fraction + _L8
    y = y * fraction * square
    turns = exponent.to(tl.float32)
    y = y + turns * _LN2_LOW
    y = y - square * 0.5
    return (fraction + y) + turns * _LN2_HIGH


@triton.jit
def _exponent_of(x):
    return (x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS) >> 23


@triton.jit
def _fraction_of(x, exponent):
    return (x.to(tl.int32, bitcast=True) - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def noise_of(bits):
    """sampling.noise_of for uint32."""
    u = (bits.to(tl.float32) + 0.5) * _WORD
    v = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _WORD
    exponent = _exponent_of(v)
    fraction = tl.where(exponent == 0, -u, _fraction_of(v, exponent))
    waiting = -_log_of_sum(fraction, exponent)
    exponent = _exponent_of(waiting)
    return -_log_of_sum(_fraction_of(waiting, exponent), exponent)


@triton.jit
def mass_of(x):
    """fixed_math.mass."""
    x = tl.where(x < _MIN_EXPONENT, _MIN_EXPONENT, x)
    shifted = x * _LOG2_E + _ROUNDER
    turns = shifted - _ROUNDER
    r = x - turns * _LN2_HIGH
    r = r - turns * _LN2_LOW
    y = r * _E0 + _E1
    y = y * r + _E2
    y = y * r + _E3
    y = y * r + _E4
    y = y * r + _E5
    y = y * (r * r) + r + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) - _POWER_OFFSET) << 23).to(tl.float32, bitcast=True)
    return (y * power * _MASS_UNITS).to(tl.int64)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MUL_1
    x = (x ^ (x >> 27)) * _MUL_2
    return x ^ (x >> 31)


@triton.jit
def noise_at(key, ids):
    """sampling.gumbel_noise for a uint64 key."""
    return noise_of((_mix(key + ids.to(tl.uint64) * _GOLDEN) >> 32).to(tl.uint32))


@triton.jit
def key_of(seed, output_len):
    """sampling.sample_keys."""
    return _mix(_mix(seed.to(tl.uint64)) + (output_len + 1).to(tl.uint64) * _GOLDEN)
