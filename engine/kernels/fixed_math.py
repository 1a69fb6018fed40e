"""Logarithm and exponential as fixed float32 operations, with equal bits on all devices.

IEEE 754 fixes +, -, * and conversions, but not log and exp. These are range reductions with the
polynomials of Cephes' logf and expf (Moshier), without fused multiply-adds.
"""

import struct

import torch
from torch import Tensor


def _float32(x: float) -> float:
    """Nearest float32, as other languages store the constant."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


SQRT_HALF_BITS = 0x3F3504F3  # of float32: mantissas lie in [sqrt(1/2), sqrt(2))
LN2_HIGH, LN2_LOW = 0.693359375, _float32(-2.12194440e-4)
LOG_POLYNOMIAL = tuple(
    _float32(x)
    for x in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
LOG2_E = _float32(1.44269504088896341)
ROUNDER = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, in the low bits
ROUNDER_BITS = 0x4B400000
EXP_POLYNOMIAL = tuple(
    _float32(x)
    for x in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
MIN_EXPONENT = -28.0  # e**-28 is below one unit of mass
MASS_UNITS = 2.0**40  # of e**0: 2**22 tokens of the largest mass fit in an int64


def log_of_sum(fraction: Tensor, exponent: Tensor) -> Tensor:
    """Return log(1 + fraction) + exponent * log(2), fraction in [-0.3, 0.4143)."""
    square = fraction * fraction
    y = fraction * LOG_POLYNOMIAL[0] + LOG_POLYNOMIAL[1]
    for coefficient in LOG_POLYNOMIAL[2:]:
        y = y * fraction + coefficient
    y = y * fraction * square
    turns = exponent.float()
    y = y + turns * LN2_LOW
    y = y - square * 0.5
    return (fraction + y) + turns * LN2_HIGH


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (fraction, exponent) with x = (1 + fraction) * 2**exponent, for normal positive
    float32.
    """
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return (bits - (exponent << 23)).view(torch.float32) - 1.0, exponent


def log(x: Tensor) -> Tensor:
    """Return log(x) of normal positive float32, within 1 ulp or 1e-7."""
    return log_of_sum(*split(x))


def mass(x: Tensor) -> Tensor:
    """Return int64 e**x in units of 2**-40 for x <= 0; their sums do not depend on order."""
    x = x.clamp_min(MIN_EXPONENT)
    shifted = x * LOG2_E + ROUNDER
    turns = shifted - ROUNDER
    r = x - turns * LN2_HIGH
    r = r - turns * LN2_LOW
    y = r * EXP_POLYNOMIAL[0] + EXP_POLYNOMIAL[1]
    for coefficient in EXP_POLYNOMIAL[2:]:
        y = y * r + coefficient
    y = y * (r * r) + r + 1.0
    power = ((shifted.view(torch.int32) - (ROUNDER_BITS - 127)) << 23).view(torch.float32)
    return (y * power * MASS_UNITS).to(torch.int64)
