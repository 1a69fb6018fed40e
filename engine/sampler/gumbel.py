"""Noise for sampling tokens: a pure function of (seed, position, token id).

A sample is argmax(logit / temperature + noise) (the Gumbel-max trick), so it is the same in any batch or process and after a
retraction, and small differences of the logits move it only near a tie. The mixing is SplitMix64's finaliser (Steele, Lea,
Flood: "Fast splittable pseudorandom number generators", 2014).
"""

from collections.abc import Sequence

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def sample_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return a signed 64-bit key for each sample. `positions`: output tokens before it."""
    return [_signed(_mix(_mix(seed & _MASK) + (at + 1) * _GOLDEN)) for seed, at in zip(seeds, positions, strict=True)]


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [n, m]. keys: [n, 1] int64; token_ids: [n, m] or [1, m] int64."""
    x = keys + token_ids * _signed(_GOLDEN)
    _xor_shift(x, 30).mul_(_signed(_MUL_1))
    _xor_shift(x, 27).mul_(_signed(_MUL_2))
    _xor_shift(x, 31)
    # the top 32 bits, centred: u in (0, 1); float32 is exact for small u, which gives large noise
    u = _shift(x, 32).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return x.bitwise_xor_(_shift(x, bits))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
