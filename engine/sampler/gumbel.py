"""Noise for sampling tokens: a pure function of (seed, position, token id).

A sample is argmax(logit / temperature + noise) (the Gumbel-max trick), so it is the same in any batch or process and after a
retraction, and small differences of the logits move it only near a tie.
"""

from collections.abc import Sequence

import torch

from engine.kv.splitmix import GOLDEN, MUL_1, MUL_2, mix, shift, signed

_MASK = (1 << 64) - 1


def sample_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return a signed 64-bit key for each sample. `positions`: output tokens before it."""
    return [signed(_mix(_mix(seed & _MASK) + (at + 1) * GOLDEN)) for seed, at in zip(seeds, positions, strict=True)]


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [n, m]. keys: [n, 1] int64; token_ids: [n, m] or [1, m] int64."""
    x = mix(keys + token_ids * signed(GOLDEN))
    # the top 32 bits, centred: u in (0, 1); float32 is exact for small u, which gives large noise
    u = shift(x, 32).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * MUL_2) & _MASK
    return x ^ (x >> 31)
