"""Products of linear.c against those in fp64, of bf16 and integer weights: each kind of arithmetic that this CPU has, any batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch

from engine.kernels import build
from engine.kernels.build import Kind
from engine.kernels.linear import PANEL, SOURCE, LinearKernel, PackedMatrices, PackedMatrix, linear_kernel
from engine.layers.linear import silu_mul
from engine.quant.integers import BLOCK, E2M1, SCHEMES, Integers, Weight, columns_of, mxfp4_codes, quantized

SHAPES = [(320, 256), (100, 72), (33, 31), (1, 1), (17, 1500)]
# Around tiles (16), blocks (32), what counts as few (128), and beyond what lies packed at a time (1024).
ROWS = [1, 2, 15, 16, 33, 129, 1100]
BF16 = "bf16"
KINDS = [*SCHEMES, "mxfp4"]
# Rows of the experts: none, one, around tiles and blocks, what counts as few (128) and more.
EXPERT_ROWS = [[1, 0, 0, 2, 15], [0, 0, 0, 0, 1], [17, 33, 0, 128, 1], [129, 16, 700, 0, 32]]


def kernel_of(kind: Kind) -> LinearKernel:
    library = SOURCE.load(kind=kind)
    assert library is not None
    return LinearKernel(library)


def kinds() -> list[Kind]:
    """Those that this CPU has and its kernel grants: AMX needs leave."""
    best = linear_kernel()
    return [] if best is None else [kind for kind in build.cpu_kinds() if kind <= best.kind]


@pytest.fixture(params=kinds(), ids=lambda kind: kind.label)
def kernel(request: pytest.FixtureRequest) -> LinearKernel:
    return kernel_of(request.param)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_a_library_multiplies_by_the_kind_it_was_asked_for() -> None:
    assert [kernel_of(kind).kind for kind in kinds()] == kinds()


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


def weight_of(scheme: str, outputs: int, inputs: int, *, seed: int) -> Weight:
    return drawn(outputs, inputs, seed=seed) if scheme == BF16 else integers(scheme, outputs, inputs, seed=seed)


def integers(scheme: str, outputs: int, inputs: int, *, seed: int) -> Integers:
    if scheme == "mxfp4":
        random = torch.Generator().manual_seed(seed)
        blocks = torch.randint(0, 256, (outputs, -(-inputs // BLOCK), BLOCK // 2), generator=random).byte()
        scales = torch.randint(120, 127, blocks.shape[:2], generator=random).byte()
        weight = mxfp4_codes(blocks, scales, dtype=torch.bfloat16)
        return replace(weight, values=weight.values[:, :inputs].contiguous())
    return quantized(drawn(outputs, inputs, seed=seed), SCHEMES[scheme])


def values(weight: Weight) -> torch.Tensor:
    """In fp64, unrounded."""
    if isinstance(weight, torch.Tensor):
        return weight.double()
    own = torch.tensor(E2M1).double()[weight.values.int() + 8] if weight.e2m1 else weight.values
    each = weight.scales.double().repeat_interleave(weight.group, 1)[:, : weight.shape[1]] * own
    if weight.offsets is not None:
        each += weight.offsets.double().repeat_interleave(weight.group, 1)[:, : weight.shape[1]]
    return each


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("scheme", "biased"), [(BF16, False), *product([BF16, *KINDS], [True])])
def test_any_shape_equals_the_product(kernel: LinearKernel, shape: tuple[int, int], scheme: str, biased: bool) -> None:
    """Partial sums are fp32; results are these, rounded once."""
    weight, bias = weight_of(scheme, *shape, seed=1), drawn(shape[0], seed=2) if biased else None
    matrix, dense = kernel.pack(weight, bias), values(weight)
    for rows in ROWS:
        x = drawn(rows, shape[1], seed=100 + rows)
        summed = (x.double().abs() @ dense.abs().t()).max()
        partial, rounded = matrix.partial(x), matrix.times(x)
        torch.testing.assert_close(partial.double(), exact(x, dense, bias), rtol=0, atol=float(summed) * 5e-7)
        assert torch.equal(rounded, partial.bfloat16())
        assert torch.equal(matrix.times(x, dtype=torch.float32), rounded.float())
        assert shape[1] == 1 or not torch.equal(partial, rounded.float())


def test_every_integer_is_exact(kernel: LinearKernel) -> None:
    for bits, low, high in ((4, -8, 8), (8, -128, 128)):
        every = torch.arange(low, high).to(torch.int8)
        grid = torch.stack([every.roll(i) for i in range(32)])  # [32, 2 ** bits]
        weight = Integers(grid, torch.ones(32, 1), None, bits, grid.shape[1], torch.bfloat16)
        assert torch.equal(kernel.pack(weight, None).times(torch.eye(grid.shape[1]).bfloat16()), grid.t().bfloat16())


@pytest.mark.parametrize(("scheme", "shape"), [*product([BF16, *KINDS], [(320, 256)]), (BF16, (17, 1500))], ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    kernel: LinearKernel, scheme: str, shape: tuple[int, int]
) -> None:
    matrix = kernel.pack(weight_of(scheme, *shape, seed=1), drawn(shape[0], seed=2))
    x = drawn(1100, shape[1], seed=3)
    whole = matrix.times(x)
    for begin, end in ((0, 1), (0, 16), (3, 20), (5, 37), (0, 33), (300, 399), (500, 700), (1099, 1100)):
        assert torch.equal(matrix.times(x[begin:end]), whole[begin:end])
    for count in (2, 3):
        with threads(count):
            assert torch.equal(matrix.times(x), whole) and torch.equal(matrix.times(x[:50]), whole[:50])


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


@pytest.mark.parametrize("shape", [(320, 256), (100, 72), (17, 1500)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 96, 4096])
@pytest.mark.parametrize("offsets", [False, True])
def test_few_rows_have_the_bits_of_many(
    kernel: LinearKernel, shape: tuple[int, int], bits: int, group: int, offsets: bool
) -> None:
    weight = grouped(bits, group, *shape, offsets=offsets, seed=1)
    matrix, x = kernel.pack(weight, drawn(shape[0], seed=2)), of_all_sizes(49, shape[1], seed=3)
    whole = matrix.partial(x).view(torch.int32)
    for rows in (1, 2, 3, 7, 15, 16, 17):
        for begin in range(0, 49 - rows, 11):
            few = matrix.partial(x[begin : begin + rows]).view(torch.int32)
            assert torch.equal(few, whole[begin : begin + rows]), (begin, rows)


def tree(sums: list[torch.Tensor]) -> torch.Tensor:
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [*product([BF16], [(320, 256), (100, 72), (17, 1496), (64, 8)]), *product(KINDS, [(100, 512)])],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_segments_are_summed_apart_as_those_of_ranks_and_added_in_a_tree(
    kernel: LinearKernel, scheme: str, shape: tuple[int, int], biased: bool
) -> None:
    outputs, inputs = shape
    weight, bias = weight_of(scheme, *shape, seed=1), drawn(outputs, seed=2) if biased else None
    for segments in (2, 4, 8) if scheme == BF16 else (4,):  # whole groups
        packed, size = kernel.pack(weight, bias, segments=segments), inputs // segments
        spans = [slice(at, at + size) for at in range(0, inputs, size)]
        apart = [kernel.pack(columns_of(weight, span), bias if span.start == 0 else None) for span in spans]
        for rows in ROWS:
            x = drawn(rows, inputs, seed=rows)
            expected = tree([one.partial(x[:, span]) for one, span in zip(apart, spans, strict=True)])
            assert torch.equal(packed.partial(x), expected), (segments, rows)
            assert torch.equal(packed.times(x), expected.bfloat16()), (segments, rows)


@pytest.mark.parametrize("scheme", KINDS)
def test_norm_and_gate_are_those_of_bf16_products(kernel: LinearKernel, scheme: str) -> None:
    matrix, x = kernel.pack(integers(scheme, 96, 64, seed=1), None, gates=True), drawn(9, 64, seed=2)
    ones = torch.ones(64).bfloat16()
    normed = matrix.times_normed(x, ones, eps=1e-6)
    plain = (x.float() * (x.float().square().mean(1, keepdim=True) + 1e-6).rsqrt()).bfloat16()
    torch.testing.assert_close(normed, matrix.times(plain), rtol=2**-6, atol=2**-4)
    assert torch.equal(matrix.times_normed(x, ones, eps=1e-6, gated=True), silu_mul(normed))


@pytest.mark.parametrize(
    ("scheme", "shape"), [*product([BF16], [(64, 64), (100, 72), (33, 31)]), *product(KINDS, [(96, 160)])], ids=str
)
@pytest.mark.parametrize("count", [1, 3])
def test_experts_have_the_bits_of_each_alone(
    kernel: LinearKernel, scheme: str, shape: tuple[int, int], count: int
) -> None:
    """Whatever rows the others have; a gated product is the gated values."""
    gates, weights = shape[0] % PANEL == 0, [weight_of(scheme, *shape, seed=i) for i in range(5)]
    alone = [kernel.pack(weight, None, gates=gates) for weight in weights]
    together = PackedMatrices(kernel, list(weights), gates=gates)
    with threads(count):
        for rows in EXPERT_ROWS:
            x, counts = drawn(sum(rows), shape[1], seed=sum(rows)), torch.tensor(rows)
            pieces = list(zip(alone, torch.split(x, rows), strict=True))
            assert torch.equal(together.times(x, counts), torch.cat([one.times(piece) for one, piece in pieces]))
            assert torch.equal(together.partial(x, counts), torch.cat([one.partial(piece) for one, piece in pieces]))
            if gates:
                assert torch.equal(together.gated(x, counts), silu_mul(together.times(x, counts)))


def test_rows_of_a_wider_tensor_and_strided_columns(kernel: LinearKernel) -> None:
    packed = kernel.pack(drawn(64, 48, seed=1), None)
    wide = drawn(10, 100, seed=2)
    rows = wide[:, 20:68]
    columns = drawn(48, 10, seed=3).t()
    assert torch.equal(packed.times(rows), packed.times(rows.contiguous()))
    assert torch.equal(packed.times(columns), packed.times(columns.contiguous()))
    assert packed.times(rows[:0]).shape == (0, 64)


def test_a_nan_stays_in_its_row(kernel: LinearKernel) -> None:
    packed = kernel.pack(drawn(64, 48, seed=1), None)
    x = drawn(20, 48, seed=2)
    x[7, 5] = torch.nan
    bad = packed.times(x).isnan()
    assert bad[7].all() and bad.sum() == 64


def test_what_does_not_fit_never_reaches_c() -> None:
    best = linear_kernel()
    if best is None:
        return  # nothing that could be reached
    packed: PackedMatrix = best.pack(drawn(64, 48, seed=1), None)
    for x in (drawn(2, 64, seed=2), drawn(2, 48, seed=2).float()):
        with pytest.raises(AssertionError):
            packed.times(x)
