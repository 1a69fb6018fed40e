"""The noise and the masses: the same bits in C as in torch, near what float64 says, and Gumbel's distribution."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import fixed_math
from engine.kernels.rows import sample_kernel
from engine.sampler.sampling import gumbel_noise, noise_of

WORDS = 1 << 32


def random_bits(count: int = 1 << 20) -> Tensor:
    return torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(1))


def extreme_bits() -> Tensor:
    near = torch.arange(-64, 64)
    powers = torch.cat([near + (1 << k) for k in range(7, 32)])
    branch = near + round((1 - 0.5**0.5) * WORDS)  # where the logarithm's range ends
    return torch.cat([near + 64, WORDS - 65 - near, powers, WORDS - powers, branch])


@pytest.mark.parametrize("bits", [random_bits(), extreme_bits()], ids=["random", "extreme"])
def test_c_computes_the_bits_of_torch(bits: Tensor) -> None:
    kernel = sample_kernel()
    assert kernel is not None
    assert torch.equal(kernel.noise(bits).view(torch.int32), noise_of(bits).view(torch.int32))


@pytest.mark.parametrize("bits", [random_bits(), extreme_bits()], ids=["random", "extreme"])
def test_noise_is_near_what_float64_says(bits: Tensor) -> None:
    exact = -np.log(-np.log1p(-(bits.numpy() + 0.5) / WORDS))
    found = noise_of(bits).numpy()
    error = np.abs(found - exact)
    assert error.max() < 1e-6
    far = np.abs(exact) > 1
    assert (error[far] / np.spacing(np.abs(exact[far]).astype(np.float32))).max() < 2.2  # units in the last place


def test_bounds() -> None:
    noise = noise_of(torch.tensor([0, WORDS - 1]))
    assert noise.tolist() == pytest.approx([33 * math.log(2), -math.log(33 * math.log(2))], abs=1e-6)


def test_noise_follows_gumbels_distribution() -> None:
    """Kolmogorov and Smirnov's test over a million tokens of a key, and over one token of many keys."""
    ids, keys = torch.arange(1 << 20)[None], torch.arange(1 << 20)[:, None] * 7919
    for noise in (gumbel_noise(torch.tensor([[5]]), ids), gumbel_noise(keys, torch.tensor([[5]]))):
        values = np.sort(noise.flatten().double().numpy())
        expected = np.exp(-np.exp(-values))
        steps = np.arange(len(values) + 1) / len(values)
        distance = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
        assert distance * len(values) ** 0.5 < 1.95  # a chance of 0.001


def test_mass_is_the_exponential_in_units() -> None:
    x = -torch.rand(1 << 18, generator=torch.Generator().manual_seed(2)) * 40
    exact = x.double().exp()
    found = fixed_math.mass(x).double() / fixed_math.MASS_UNITS
    assert ((found - exact).abs() <= 1e-7 * exact + 2.0**-40).all()
    edges = torch.tensor([0.0, -0.0, -28.0, -1e30, -torch.inf])
    assert fixed_math.mass(edges).tolist() == [1 << 40, 1 << 40, 0, 0, 0]
