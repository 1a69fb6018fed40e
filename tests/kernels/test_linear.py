"""linear.c against the product written out in fp64: each kind of arithmetic that this CPU has, odd shapes, any batch."""

import pytest
import torch

from engine.kernels import build
from engine.kernels.build import Kind
from engine.kernels.linear import SOURCE, LinearKernel, PackedMatrix, linear_kernel

SHAPES = [(64, 64), (320, 256), (100, 72), (33, 31), (1, 1), (17, 1500)]
# Around tiles (16), blocks (32), what counts as few (128), and beyond what lies packed at a time (1024).
ROWS = [1, 2, 15, 16, 17, 32, 33, 129, 1100]


def kernel_of(kind: Kind) -> LinearKernel:
    library = SOURCE.load(kind=kind)
    assert library is not None
    return LinearKernel(library)


def kinds() -> list[Kind]:
    """Those that this CPU has and its kernel grants: AMX needs leave."""
    best = linear_kernel()
    return [] if best is None else [kind for kind in build.cpu_kinds() if kind <= best.kind]


def test_a_library_multiplies_by_the_kind_it_was_asked_for() -> None:
    assert [kernel_of(kind).kind for kind in kinds()] == kinds()


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_any_shape_equals_the_product(kind: Kind, shape: tuple[int, int], biased: bool) -> None:
    weight, bias = drawn(*shape, seed=1), drawn(shape[0], seed=2) if biased else None
    packed = kernel_of(kind).pack(weight, bias)
    for rows in ROWS:
        x = drawn(rows, shape[1], seed=rows)
        expected = exact(x, weight, bias)
        summed = (x.double().abs() @ weight.double().abs().t()).max()
        # one rounding to bf16 (2**-9), and fp32 sums of at most `summed`
        torch.testing.assert_close(packed.times(x).double(), expected, rtol=2**-8, atol=float(summed) * 1e-5)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("shape", [(320, 256), (17, 1500)], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(kind: Kind, shape: tuple[int, int]) -> None:
    packed = kernel_of(kind).pack(drawn(*shape, seed=1), drawn(shape[0], seed=2))
    x = drawn(1100, shape[1], seed=3)
    whole = packed.times(x)
    for begin, end in ((0, 1), (0, 16), (3, 20), (5, 37), (0, 33), (300, 399), (500, 700), (1099, 1100)):
        assert torch.equal(packed.times(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_threads_do_not_change_the_bits(kind: Kind) -> None:
    weight, x = drawn(320, 256, seed=1), drawn(50, 256, seed=2)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(kernel_of(kind).pack(weight, None).times(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_float32_results_are_the_rounded_ones(kind: Kind) -> None:
    packed = kernel_of(kind).pack(drawn(100, 72, seed=1), drawn(100, seed=2))
    x = drawn(20, 72, seed=3)
    got = packed.times(x, dtype=torch.float32)
    assert got.dtype == torch.float32 and torch.equal(got, packed.times(x).float())


def tree(sums: list[torch.Tensor]) -> torch.Tensor:
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("biased", [False, True])
def test_a_partial_sum_is_not_rounded(kind: Kind, biased: bool) -> None:
    weight, bias = drawn(100, 1500, seed=1), drawn(100, seed=2) if biased else None
    packed, x = kernel_of(kind).pack(weight, bias), drawn(20, 1500, seed=3)
    partial = packed.partial(x)
    torch.testing.assert_close(partial.double(), exact(x, weight, bias), rtol=1e-6, atol=1e-4)
    assert torch.equal(partial.bfloat16(), packed.times(x)) and not torch.equal(partial, packed.times(x).float())


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize("shape", [(320, 256), (100, 72), (17, 1496), (64, 8)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_segments_are_summed_apart_and_added_in_a_tree(kind: Kind, shape: tuple[int, int], biased: bool) -> None:
    kernel, (outputs, inputs) = kernel_of(kind), shape
    weight, bias = drawn(*shape, seed=1), drawn(outputs, seed=2) if biased else None
    for segments in (2, 4, 8):
        packed, size = kernel.pack(weight, bias, segments=segments), inputs // segments
        spans = [slice(at, at + size) for at in range(0, inputs, size)]
        apart = [kernel.pack(weight[:, span], bias if span.start == 0 else None) for span in spans]
        for rows in ROWS:
            x = drawn(rows, inputs, seed=rows)
            expected = tree([one.partial(x[:, span]) for one, span in zip(apart, spans, strict=True)])
            assert torch.equal(packed.partial(x), expected), (segments, rows)
            assert torch.equal(packed.times(x), expected.bfloat16()), (segments, rows)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_rows_of_a_wider_tensor_and_strided_columns(kind: Kind) -> None:
    packed = kernel_of(kind).pack(drawn(64, 48, seed=1), None)
    wide = drawn(10, 100, seed=2)
    rows = wide[:, 20:68]
    columns = drawn(48, 10, seed=3).t()
    assert torch.equal(packed.times(rows), packed.times(rows.contiguous()))
    assert torch.equal(packed.times(columns), packed.times(columns.contiguous()))
    assert packed.times(rows[:0]).shape == (0, 64)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_a_nan_stays_in_its_row(kind: Kind) -> None:
    packed = kernel_of(kind).pack(drawn(64, 48, seed=1), None)
    x = drawn(20, 48, seed=2)
    x[7, 5] = torch.nan
    bad = packed.times(x).isnan()
    assert bad[7].all() and bad.sum() == 64


def test_what_does_not_fit_never_reaches_c() -> None:
    kernel = linear_kernel()
    if kernel is None:
        return  # nothing that could be reached
    packed: PackedMatrix = kernel.pack(drawn(64, 48, seed=1), None)
    for x in (drawn(2, 64, seed=2), drawn(2, 48, seed=2).float()):
        with pytest.raises(AssertionError):
            packed.times(x)
