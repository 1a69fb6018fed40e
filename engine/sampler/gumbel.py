"""Sampling noise as a function of (seed, position, token id), with equal bits on all devices.

A sample is argmax(logit / temperature + noise) (Gumbel-max), so it is equal in any batch or process
and after a retraction. Bits are SplitMix64's and engine/kernels/fixed_math.py's.
"""

from collections.abc import Sequence

import torch

from engine.kernels import fixed_math
from engine.kv.splitmix import GOLDEN, MUL_1, MUL_2, mix, shift, signed

_MASK = (1 << 64) - 1


def sample_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Signed 64-bit keys; `positions` count earlier output tokens."""
    return [signed(_mix(_mix(seed & _MASK) + (at + 1) * GOLDEN)) for seed, at in zip(seeds, positions, strict=True)]


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return noise float32[n, m] in [-3.14, 22.88]; int64 keys [n, 1], ids [n or 1, m]."""
    return noise_of(shift(mix(keys + token_ids * signed(GOLDEN)), 32))


def noise_of(bits: torch.Tensor) -> torch.Tensor:
    """Return float32 -log(-log(1 - u)), u = (bits + 1/2) / 2**32, for int64 bits in [0, 2**32).

    1 - u uses inverted bits, so neither tail loses digits.
    """
    u = (bits.float() + 0.5) * 2.0**-32
    fraction, exponent = fixed_math.split(((0xFFFFFFFF - bits).float() + 0.5) * 2.0**-32)
    fraction = torch.where(exponent == 0, -u, fraction)
    return -fixed_math.log(-fixed_math.log_of_sum(fraction, exponent))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * MUL_2) & _MASK
    return x ^ (x >> 31)
