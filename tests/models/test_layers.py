"""Layers against their formulas, written out; each with our kernels and with torch's operators in their place."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from engine.kernels.rows import elementwise
from engine.layers import linear
from engine.layers.experts import grouped_product
from engine.layers.linear import Linear, RMSNorm, Scaled, gelu_mul, sigmoid_mul, silu_mul
from engine.layers.rope import NormedRope, apply_rope

TOKENS, HEADS, DIM = 5, 3, 64
ONE_ROUNDING = 2**-8  # of bf16, relative: half a step, doubled where sums of another order fall on a tie's other side


@pytest.fixture(params=["ours", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Who computes bf16 on this CPU."""
    if request.param == "torch":
        monkeypatch.setattr(linear, "linear_kernel", lambda: None)
        monkeypatch.setattr("engine.kernels.rows.elementwise", lambda: None)
    yield request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_bf16_linear_gives_what_plain_gives(kernels: str, rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(320, 256, generator=generator).bfloat16()
    bias = torch.randn(320, generator=generator).bfloat16() if biased else None
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    layer = Linear(weight, bias)
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-2, atol=1e-2)
    assert torch.equal(layer.in_float32(x), layer(x).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 48, 1024, 24])
def test_norm_of_a_sum_is_its_formula(kernels: str, dtype: torch.dtype, width: int, generator: torch.Generator) -> None:
    """24 is a width that the kernel does not take."""
    weight, x, delta = (torch.randn(n, width, generator=generator).to(dtype) for n in (1, TOKENS, TOKENS))
    total = x + delta
    expected = _norm(total.double(), weight[0].double())
    norm = RMSNorm(weight[0], eps=1e-6)
    tolerance = ONE_ROUNDING if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(norm(total).double(), expected, rtol=tolerance, atol=tolerance)
    got = norm.of_sum(x, delta)
    assert torch.equal(got, norm(total)) and torch.equal(x, total)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [64, 80])
def test_heads_are_normed_each_by_its_own_weight_and_turned(
    kernels: str, dtype: torch.dtype, normed: bool, dim: int, generator: torch.Generator
) -> None:
    """80: the kernel takes multiples of 32. The heads behind the ones at hand (v) stay as they are."""
    whole = torch.randn(TOKENS, HEADS + 2, dim, generator=generator).to(dtype)
    weight = torch.randn(HEADS, dim, generator=generator).to(dtype) if normed else None
    angles = torch.randn(TOKENS, 1, dim // 2, generator=generator)
    cosine = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sine = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    heads = whole[:, :HEADS].double()
    if weight is not None:
        heads = torch.stack([_norm(heads[:, h], weight[h].double()) for h in range(HEADS)], 1)
    swapped = torch.cat((heads[..., dim // 2 :], heads[..., : dim // 2]), -1)
    expected = heads * cosine.double() + swapped * sine.double()
    behind = whole[:, HEADS:].clone()
    got = NormedRope(weight, like=whole, eps=1e-6)(whole[:, :HEADS], (cosine, sine))
    tolerance = 4 * ONE_ROUNDING if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(whole[:, HEADS:], behind)


def test_turns_have_the_bits_of_torchs(generator: torch.Generator) -> None:
    """Without a norm nothing depends on an order of sums."""
    x = torch.randn(TOKENS, HEADS, DIM, generator=generator).bfloat16()
    cosine, sine = (torch.randn(TOKENS, 1, DIM, generator=generator).bfloat16() for _ in range(2))
    expected = apply_rope(x, cosine, sine)
    assert torch.equal(NormedRope(None, like=x, eps=1e-6)(x, (cosine, sine)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 3072, 24])
def test_silu_times_up_is_its_formula(kernels: str, dtype: torch.dtype, width: int, generator: torch.Generator) -> None:
    x = (4 * torch.randn(TOKENS, 2 * width, generator=generator)).to(dtype)
    x[0, :8] = torch.tensor([0.0, -0.0, 88.0, -88.0, 200.0, -200.0, 1e-3, -1e-3]).to(dtype)
    gate, up = x.double().split(width, -1)
    expected = gate / (1 + (-gate).exp()) * up
    tolerance = 2 * ONE_ROUNDING if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(silu_mul(x).double(), expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 16, 40, 300])
@pytest.mark.parametrize("width", [48, 256])
@pytest.mark.parametrize("followed", [False, True])
def test_one_pass_gives_the_bits_of_two(
    kernels: str, rows: int, width: int, followed: bool, generator: torch.Generator
) -> None:
    """The norm before a product, with an adapter's delta behind it and without."""
    layer = Linear(torch.randn(100, width, generator=generator).bfloat16(), torch.randn(100).bfloat16())
    if followed:
        layer.delta = lambda x, y: y.add_(x[:, :1])  # type: ignore[func-returns-value]
    norm = RMSNorm(torch.randn(width, generator=generator).bfloat16(), eps=1e-6)
    x, delta = (torch.randn(rows, width, generator=generator).bfloat16() for _ in range(2))
    total = x + delta
    assert torch.equal(layer.of_norm(norm, x.clone(), None), layer(norm(x)))
    assert torch.equal(layer.of_norm(norm, x, delta), layer(norm(total)))
    assert torch.equal(x, total)
    assert torch.equal(layer(x), layer(x.clone()))  # nothing of the passes before is left


@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize("outputs", [64, 48])
@pytest.mark.parametrize("followed", [False, True])
def test_a_gate_behind_its_product_has_the_bits_of_two_passes(
    kernels: str, rows: int, outputs: int, followed: bool, generator: torch.Generator
) -> None:
    """As the product alone, which does not tell how its weights lie."""
    weight, bias = torch.randn(outputs, 96, generator=generator).bfloat16(), torch.randn(outputs).bfloat16()
    layer, plain = Linear(weight, bias, gates=True), Linear(weight, bias)
    if followed:
        layer.delta = plain.delta = lambda x, y: y.add_(x[:, :1])  # type: ignore[func-returns-value]
    norm = RMSNorm(torch.randn(96, generator=generator).bfloat16(), eps=1e-6)
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    assert torch.equal(layer.gated_of_norm(norm, x, None), silu_mul(plain.of_norm(norm, x, None)))
    assert torch.equal(layer(x), plain(x))


def test_rows_have_the_same_bits_in_any_batch_and_with_any_threads(generator: torch.Generator) -> None:
    """Enough rows for threads to be woken."""
    weight = torch.randn(256, generator=generator).bfloat16()
    x = torch.randn(300, 256, generator=generator).bfloat16()
    norm, before = RMSNorm(weight, eps=1e-6), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = norm(x), silu_mul(x)
    finally:
        torch.set_num_threads(before)
    for rows in (slice(0, 1), slice(7, 19), slice(299, 300)):
        assert torch.equal(norm(x[rows]), whole[0][rows])
        assert torch.equal(silu_mul(x[rows]), whole[1][rows])


def test_norms_and_gates_round_where_torch_rounds(generator: torch.Generator) -> None:
    """Sums of another order and another e^x move one result in thousands to the neighbour; a rounding less, every tenth."""
    x, other = (torch.randn(40, 2048, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(2048, generator=generator).bfloat16()
    heads, one = x.view(40, 16, 128), torch.ones(40, 1, 128).bfloat16()
    pairs = {
        "norm": (RMSNorm(weight, eps=1e-6)(x), functional.rms_norm(x, (2048,), weight, 1e-6)),
        "gate": (silu_mul(torch.cat((x, other), 1)), functional.silu(x).mul_(other)),
        "heads": (
            NormedRope(weight.view(16, 128), like=x, eps=1e-6)(heads.clone(), (one, torch.zeros_like(one))),
            functional.rms_norm(heads, (128,), None, 1e-6).mul_(weight.view(16, 128)),
        ),
    }
    for name, (got, expected) in pairs.items():
        assert (got != expected).float().mean() < 5e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_gemma_and_granite_compute_otherwise_is_its_formula(
    kernels: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Norms that multiply by 1 + weight, gelu times up, and a scaled sum; each also behind a sum."""
    tolerance = 2 * ONE_ROUNDING if dtype == torch.bfloat16 else 1e-5
    x, delta = (torch.randn(TOKENS, 96, generator=generator).to(dtype) for _ in range(2))
    weight, total = (0.1 * torch.randn(96, generator=generator)).to(dtype), x + delta
    norm = RMSNorm(weight, eps=1e-6, offset=1.0)
    wide = total.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight.double())
    torch.testing.assert_close(norm(total).double(), expected, rtol=tolerance, atol=1e-6)
    assert torch.equal(norm.of_sum(x, delta), norm(total)) and torch.equal(x, total)
    heads, one = total.view(TOKENS, 3, 32), torch.ones(TOKENS, 1, 32, dtype=dtype)
    rope = NormedRope(weight.view(3, 32), like=heads, eps=1e-6, offset=1.0)
    expected = functional.rms_norm(heads.double(), (32,), None, 1e-6) * (1 + weight.double().view(3, 32))
    got = rope(heads.clone(), (one, torch.zeros_like(one)))
    torch.testing.assert_close(got.double(), expected, rtol=2 * tolerance, atol=1e-6)
    gate, up = (3 * total).double().split(48, -1)
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu_mul(3 * total).double(), expected, rtol=2 * tolerance, atol=2e-6)
    torch.testing.assert_close(Scaled(0.22)(total.clone()).double(), wide * 0.22, rtol=tolerance, atol=0)


def test_a_nan_stays_in_its_row(generator: torch.Generator) -> None:
    x = torch.randn(TOKENS, DIM, generator=generator).bfloat16()
    x[2, 3] = torch.nan
    for got in (RMSNorm(torch.ones(DIM).bfloat16(), eps=1e-6)(x), silu_mul(x)):
        assert got[2].isnan().any() and got.isnan().any(1).sum() == 1


def test_what_does_not_fit_never_reaches_c() -> None:
    kernel = elementwise()
    if kernel is None:
        return  # no compiler: nothing that could be reached
    x, weight = torch.zeros(2, 64).bfloat16(), torch.ones(64).bfloat16()
    heads, turn = torch.zeros(2, 1, 64).bfloat16(), torch.zeros(3, 1, 64).bfloat16()
    for call in (
        lambda: kernel.rms_norm(x.float(), weight, eps=1e-6),
        lambda: kernel.rms_norm(x, weight[:32], eps=1e-6),
        lambda: kernel.rms_norm(x[:, ::2], weight[:32], eps=1e-6),
        lambda: kernel.rms_norm(x, weight, eps=1e-6, delta=x[:1]),
        lambda: kernel.silu_mul(x[:, :24]),
        lambda: kernel.silu_mul(x.float()),
        lambda: kernel.norm_rope(heads, (turn, turn), weight=None, eps=1e-6),
        lambda: kernel.norm_rope(heads, (heads, heads), weight=weight[None, :32], eps=1e-6),
        lambda: kernel.norm_rope(heads.transpose(0, 2), (turn, turn), weight=None, eps=1e-6),
    ):
        with pytest.raises(AssertionError):
            call()


def test_a_gate_multiplies_by_its_sigmoid() -> None:
    """Our kernel rounds where torch does; gates may be columns of a wider tensor."""
    generator = torch.Generator().manual_seed(5)
    wide, x = torch.randn(7, 96, generator=generator) * 6, torch.randn(7, 48, generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        gates, values = wide.to(dtype)[:, 16:64], x.to(dtype)
        wanted = gates.double().sigmoid() * values.double()
        assert (sigmoid_mul(gates, values) - wanted).abs().max() < tolerance


@pytest.mark.parametrize("rows", [[3, 0, 4, 1], [0, 0, 8, 0], [8, 0, 0, 0], [0, 0, 0, 8]])
def test_a_grouped_product_is_each_experts_rows_by_its_matrix(rows: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(*shape, generator=draw) for shape in ((8, 16), (4, 16, 32)))
    expected = torch.cat([part @ weight for part, weight in zip(x.split(rows), weights, strict=True)])
    assert torch.allclose(grouped_product(x, weights, torch.tensor(rows)), expected, atol=1e-5)
