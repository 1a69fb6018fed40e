"""Layers against their formulas, written out."""

import pytest
import torch
from torch.nn import functional

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_bf16_linear_gives_what_plain_gives(rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(320, 256, generator=generator).bfloat16()
    bias = torch.randn(320, generator=generator).bfloat16() if biased else None
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(Linear(weight, bias)(x).double(), exact, rtol=1e-2, atol=1e-2)


def test_packed_bf16_linear_gives_a_row_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(torch.randn(320, 256, generator=generator).bfloat16())
    x = torch.randn(32, 256, generator=generator).bfloat16()
    whole = linear(x)
    for rows in (1, 2, 5, 16):
        assert torch.equal(linear(x[:rows]), whole[:rows])


def test_norm_per_head_equals_each_head_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 8, generator=generator)
    x = torch.randn(5, 3, 8, generator=generator)
    before = x.clone()
    got = RMSNorm(weight, eps=1e-6)(x)
    for head in range(3):
        torch.testing.assert_close(got[:, head], RMSNorm(weight[head], eps=1e-6)(x[:, head]))
    assert torch.equal(x, before)
