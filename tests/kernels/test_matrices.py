"""Products of many matrices at once are those of each alone, to the bit, whatever rows the others have."""

import pytest
import torch

from engine.kernels.build import Kind
from engine.kernels.linear import PANEL, PackedMatrices
from engine.layers.linear import silu_mul
from tests.kernels.test_linear import drawn, kernel_of, kinds

# No row, one, around tiles and blocks, what counts as few (128) and more.
ROWS = [[1, 0, 0, 2, 15], [0, 0, 0, 0, 1], [17, 33, 0, 128, 1], [129, 16, 700, 0, 32]]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("shape", [(64, 64), (100, 72), (33, 31)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_each_matrix_multiplies_its_rows(kind: Kind, shape: tuple[int, int], threads: int) -> None:
    kernel, weights = kernel_of(kind), [drawn(*shape, seed=i) for i in range(5)]
    alone = [kernel.pack(weight, None, gates=shape[0] % PANEL == 0) for weight in weights]
    together = PackedMatrices(kernel, list(weights), gates=shape[0] % PANEL == 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in ROWS:
            x, counts = drawn(sum(rows), shape[1], seed=sum(rows)), torch.tensor(rows)
            pieces = list(zip(alone, torch.split(x, rows), strict=True))
            assert torch.equal(together.times(x, counts), torch.cat([one.times(piece) for one, piece in pieces]))
            assert torch.equal(together.partial(x, counts), torch.cat([one.partial(piece) for one, piece in pieces]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_a_gated_product_is_the_gated_values(kind: Kind) -> None:
    together = PackedMatrices(kernel_of(kind), [drawn(96, 64, seed=i) for i in range(3)], gates=True)
    x, counts = drawn(40, 64, seed=9), torch.tensor([5, 0, 35])
    assert torch.equal(together.gated(x, counts), silu_mul(together.times(x, counts)))
