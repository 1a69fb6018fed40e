"""row_max against torch's max, to the bit."""

import pytest
import torch

from engine.sampler.sampling import row_max

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    "row",
    [
        [1.0, 3.0, 2.0],
        [3.0, 1.0, 3.0],  # a tie: the first
        [-INF, -INF, -INF],
        [1.0, INF, 2.0],
        [INF, NAN, 1.0],
        [NAN, 1.0, NAN],
        [-0.0, 0.0, -1.0],
    ],
    ids=str,
)
def test_a_row_gives_what_torch_gives(row: list[float]) -> None:
    logits = torch.tensor([row, [5.0, 6.0, 7.0]])
    expected = logits.max(-1)
    values, indices = row_max(logits)
    assert torch.equal(indices, expected.indices)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)


def test_many_columns_and_rows_that_are_a_view() -> None:
    logits = torch.randn(9, 5003, generator=torch.Generator().manual_seed(0)).round(decimals=1)[::2, 1:]
    expected = logits.max(-1)
    values, indices = row_max(logits)
    assert torch.equal(indices, expected.indices) and torch.equal(values, expected.values)


def test_no_rows() -> None:
    values, indices = row_max(torch.empty(0, 7))
    assert values.shape == indices.shape == (0,) and indices.dtype == torch.int64
