"""Products by expert: the way that asks torch for no lengths gives what torch's grouped product gives."""

import pytest
import torch

from engine.layers.experts import _product_by_expert, grouped_product


@pytest.mark.parametrize("rows", [[3, 0, 4, 1], [0, 0, 8, 0], [8, 0, 0, 0], [0, 0, 0, 8]])
def test_all_rows_by_each_expert_are_the_grouped_product(rows: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(*shape, generator=draw) for shape in ((8, 16), (4, 16, 32)))
    counts = torch.tensor(rows)
    expected = torch.cat([part @ weight for part, weight in zip(x.split(rows), weights, strict=True)])
    assert torch.allclose(_product_by_expert(x, weights, counts.cumsum(0)), expected, atol=1e-5)
    assert torch.allclose(grouped_product(x, weights, counts), expected, atol=1e-5)
