"""Noise for sampling tokens: a pure function of (seed, position, token id), the same bits on every device.

A sample is argmax(logit / temperature + noise) (the Gumbel-max trick), so it is the same in any batch or process and after a
retraction, and small differences of the logits move it only near a tie. The bits are those of SplitMix64 and of
engine/kernels/fixed_math.py; sample.c and triton_noise.py compute the same.
"""

from collections.abc import Sequence

import torch

from engine.kernels import fixed_math
from engine.kv.splitmix import GOLDEN, MUL_1, MUL_2, mix, shift, signed

_MASK = (1 << 64) - 1


def sample_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return a signed 64-bit key for each sample. `positions`: output tokens before it."""
    return [signed(_mix(_mix(seed & _MASK) + (at + 1) * GOLDEN)) for seed, at in zip(seeds, positions, strict=True)]


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [n, m] in [-3.14, 22.88]. keys: [n, 1] int64; token_ids: [n, m] or [1, m] int64."""
    return noise_of(shift(mix(keys + token_ids * signed(GOLDEN)), 32))


def noise_of(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log(1 - u)), float32, of u = (bits + 1/2) / 2**32; bits: int64 in [0, 2**32).

    1 - u comes from the inverted bits: neither tail loses digits.
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
