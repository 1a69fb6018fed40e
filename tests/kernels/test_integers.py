"""Integer weights in linear.c: their product in fp64, the same bits in any batch, and beside many matrices."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.build import Kind
from engine.kernels.linear import PANEL, PackedMatrices, PackedMatrix
from engine.layers.linear import silu_mul
from engine.quant.integers import BLOCK, E2M1, SCHEMES, Integers, columns_of, mxfp4_codes, quantized
from tests.kernels.test_linear import ROWS, drawn, kernel_of, kinds, tree

SHAPES = [(64, 64), (320, 256), (100, 72), (33, 31), (17, 1500)]


KINDS = [*SCHEMES, "mxfp4"]


def integers(scheme: str, outputs: int, inputs: int, *, seed: int) -> Integers:
    shape = outputs, inputs
    if scheme == "mxfp4":
        random = torch.Generator().manual_seed(seed)
        blocks = torch.randint(0, 256, (outputs, -(-inputs // BLOCK), BLOCK // 2), generator=random).byte()
        scales = torch.randint(120, 127, blocks.shape[:2], generator=random).byte()
        weight = mxfp4_codes(blocks, scales, dtype=torch.bfloat16)
        return replace(weight, values=weight.values[:, :inputs].contiguous())
    return quantized(drawn(*shape, seed=seed), SCHEMES[scheme])


def values(weight: Integers) -> torch.Tensor:
    """In fp64, unrounded."""
    own = torch.tensor(E2M1).double()[weight.values.int() + 8] if weight.e2m1 else weight.values
    each = weight.scales.double().repeat_interleave(weight.group, 1)[:, : weight.shape[1]] * own
    if weight.offsets is not None:
        each += weight.offsets.double().repeat_interleave(weight.group, 1)[:, : weight.shape[1]]
    return each


def packed(kind: Kind, weight: Integers, bias: torch.Tensor | None = None, *, segments: int = 1) -> PackedMatrix:
    return kernel_of(kind).pack(weight, bias, segments=segments)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", KINDS)
def test_any_shape_equals_the_product(kind: Kind, shape: tuple[int, int], scheme: str) -> None:
    weight, bias = integers(scheme, *shape, seed=1), drawn(shape[0], seed=2)
    matrix, exact = packed(kind, weight, bias), values(weight)
    for rows in ROWS:
        x = drawn(rows, shape[1], seed=rows)
        expected = x.double() @ exact.t() + bias.double()
        summed = (x.double().abs() @ exact.abs().t()).max()
        torch.testing.assert_close(matrix.partial(x).double(), expected, rtol=0, atol=float(summed) * 2e-6)
        assert torch.equal(matrix.times(x), matrix.partial(x).bfloat16())


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_every_integer_is_exact(kind: Kind) -> None:
    for bits, low, high in ((4, -8, 8), (8, -128, 128)):
        every = torch.arange(low, high).to(torch.int8)
        grid = torch.stack([every.roll(i) for i in range(32)])  # [32, 2 ** bits]
        weight = Integers(grid, torch.ones(32, 1), None, bits, grid.shape[1], torch.bfloat16)
        assert torch.equal(packed(kind, weight).times(torch.eye(grid.shape[1]).bfloat16()), grid.t().bfloat16())


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("scheme", KINDS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(kind: Kind, scheme: str) -> None:
    matrix, x = packed(kind, integers(scheme, 320, 256, seed=1)), drawn(300, 256, seed=3)
    whole, before = matrix.times(x), torch.get_num_threads()
    for begin, end in ((0, 1), (0, 16), (3, 20), (5, 37), (0, 33), (100, 299), (299, 300)):
        assert torch.equal(matrix.times(x[begin:end]), whole[begin:end])
    torch.set_num_threads(3)
    try:
        assert torch.equal(matrix.times(x), whole)
    finally:
        torch.set_num_threads(before)


def grouped(bits: int, group: int, outputs: int, inputs: int, *, offsets: bool, seed: int) -> Integers:
    """Every integer of `bits`, as AWQ, GPTQ and GGUF have them."""
    random, groups = torch.Generator().manual_seed(seed), -(-inputs // group)
    half = 1 << (bits - 1)
    every = torch.randint(-half, half, (outputs, inputs), generator=random, dtype=torch.int8)
    scales, zeros = torch.rand(2, outputs, groups, generator=random) - 0.5
    return Integers(every, scales, zeros if offsets else None, bits, group, torch.bfloat16)


def of_all_sizes(rows: int, inputs: int, *, seed: int) -> torch.Tensor:
    """bf16 from denormals to beyond what products hold, zeros of both signs among them."""
    random = torch.Generator().manual_seed(seed)
    mantissa = torch.randn(rows, inputs, generator=random)
    exponents = torch.tensor([-130, -126, -100, 0, 4, 60, 119]).repeat(rows)[:rows, None]
    x = (mantissa.double() * 2.0**exponents).bfloat16()
    return x.masked_fill_(torch.rand(rows, inputs, generator=random) < 0.1, -0.0)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 96, 4096])
@pytest.mark.parametrize("offsets", [False, True])
def test_few_rows_have_the_bits_of_many(
    kind: Kind, shape: tuple[int, int], bits: int, group: int, offsets: bool
) -> None:
    weight = grouped(bits, group, *shape, offsets=offsets, seed=1)
    matrix, x = packed(kind, weight, drawn(shape[0], seed=2)), of_all_sizes(49, shape[1], seed=3)
    whole = matrix.partial(x).view(torch.int32)
    for rows in (1, 2, 3, 7, 15, 16, 17):
        for begin in range(0, 49 - rows, 11):
            few = matrix.partial(x[begin : begin + rows]).view(torch.int32)
            assert torch.equal(few, whole[begin : begin + rows]), (begin, rows)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("scheme", KINDS)
def test_segments_are_those_of_ranks(kind: Kind, scheme: str) -> None:
    weight, x = integers(scheme, 100, 512, seed=1), drawn(40, 512, seed=2)
    spans = [slice(at, at + 128) for at in range(0, 512, 128)]
    apart = [columns_of(weight, span) for span in spans]
    assert all(isinstance(one, Integers) for one in apart)
    expected = tree(
        [kernel_of(kind).pack(one, None).partial(x[:, span]) for one, span in zip(apart, spans, strict=True)]
    )
    assert torch.equal(packed(kind, weight, segments=4).partial(x), expected)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("scheme", KINDS)
def test_norm_and_gate_are_those_of_bf16_products(kind: Kind, scheme: str) -> None:
    matrix, x = kernel_of(kind).pack(integers(scheme, 96, 64, seed=1), None, gates=True), drawn(9, 64, seed=2)
    ones = torch.ones(64).bfloat16()
    normed = matrix.times_normed(x, ones, eps=1e-6)
    plain = (x.float() * (x.float().square().mean(1, keepdim=True) + 1e-6).rsqrt()).bfloat16()
    torch.testing.assert_close(normed, matrix.times(plain), rtol=2**-6, atol=2**-4)
    assert torch.equal(matrix.times_normed(x, ones, eps=1e-6, gated=True), silu_mul(normed))


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("scheme", KINDS)
def test_experts_have_the_bits_of_each_alone(kind: Kind, scheme: str) -> None:
    kernel, weights = kernel_of(kind), [integers(scheme, 96, 160, seed=i) for i in range(4)]
    alone = [kernel.pack(weight, None, gates=weight.shape[0] % PANEL == 0) for weight in weights]
    together = PackedMatrices(kernel, list(weights), gates=True)
    for rows in ([1, 0, 2, 15], [0, 17, 129, 1]):
        x, counts = drawn(sum(rows), 160, seed=sum(rows)), torch.tensor(rows)
        pieces = list(zip(alone, torch.split(x, rows), strict=True))
        assert torch.equal(together.times(x, counts), torch.cat([one.times(piece) for one, piece in pieces]))
        assert torch.equal(together.gated(x, counts), silu_mul(together.times(x, counts)))
