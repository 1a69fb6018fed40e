"""Each C kernel on CPUs that this machine is not: built for them, and run under QEMU.

Products and attention are compared with float64 within what rounding allows, the rest with the same kernel here.
"""

import ctypes
import platform
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.kernels import build, paged_attention, tape
from engine.kernels.build import CSource, Kind, flags_of
from engine.kernels.checksum import CHECKSUM, WordSums
from engine.kernels.latent_attention import SOURCE as LATENTS
from engine.kernels.latent_attention import LatentKernel
from engine.kernels.linear import SOURCE as LINEAR
from engine.kernels.linear import LinearKernel, PackedMatrices
from engine.kernels.paged_attention import Softmax
from engine.kernels.recurrent import (
    CONV,
    DELTA,
    MAMBA,
    ConvKernel,
    DeltaKernel,
    DeltaWeights,
    MambaKernel,
    MambaWeights,
    StateRows,
    conv_kernel,
    delta_kernel,
    mamba_kernel,
)
from engine.kernels.rows import ELEMENTWISE, SAMPLE, Elementwise, SampleKernel, elementwise, sample_kernel
from engine.kv.page_checksum import ODD, word_sums
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    fill,
    filled_pool,
    make_pool,
    make_sequences,
    make_step,
    pages_needed,
    run_step,
    worst_error,
)
from tests.attention.test_latents import PAGE, SCALE, Shape, latent_pool, latent_reference, latent_sequences
from tests.kernels import guest
from tests.kernels.guest import Guest, Memory, Target, watched
from tests.kernels.test_linear import KINDS as SCHEMES
from tests.kernels.test_linear import drawn, exact, integers, values

ARM = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu")
TARGETS = {
    Kind.NEON: Target("aarch64-linux-gnu-gcc", flags_of(Kind.NEON, frozenset()), (*ARM, "cortex-a57")),
    Kind.NEON_BF16: Target("aarch64-linux-gnu-gcc", flags_of(Kind.NEON_BF16, frozenset()), (*ARM, "max")),
}
# Where this CPU has AVX2, the other tests run it.
if platform.machine() == "x86_64" and Kind.AVX2 not in build.cpu_kinds():
    TARGETS[Kind.AVX2] = Target("gcc", flags_of(Kind.AVX2, frozenset()), ("qemu-x86_64", "-cpu", "max"))

Open = Callable[[CSource], ctypes.CDLL]


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.slow if kind is Kind.NEON else (), id=kind.label) for kind in TARGETS]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(tape, "RUN_BYTES", 1 << 20)  # all of it is carried to the guest
    monkeypatch.setattr(tape, "HUGE_BYTES", 4096)
    with watched(monkeypatch) as memory:
        yield memory


@pytest.fixture
def library(kind: Kind, memory: Memory) -> Iterator[Open]:
    """Opens a kernel's library on the other CPU."""
    opened: list[Guest] = []

    def open_one(source: CSource) -> ctypes.CDLL:
        program, functions = guest.build(source.path, TARGETS[kind], build.cache_dir(), source.flags)
        opened.append(Guest(program, functions, TARGETS[kind], memory))
        return source.typed(cast(Any, opened[-1]))

    yield open_one
    for one in opened:
        one.close()


def test_the_library_is_of_the_kind(kind: Kind, library: Open) -> None:
    assert LinearKernel(library(LINEAR)).kind == kind


@pytest.mark.parametrize("kind", TARGETS, indirect=True, ids=lambda kind: kind.label)  # on the older ARM CPU, too
def test_products_are_those_of_float64_and_a_row_has_the_same_bits_in_any_batch(library: Open) -> None:
    kernel = LinearKernel(library(LINEAR))
    for outputs, inputs in ((100, 72), (33, 31), (64, 160)):
        weight, bias, x = drawn(outputs, inputs, seed=1), drawn(outputs, seed=2), drawn(37, inputs, seed=3)
        packed = kernel.pack(weight, bias)
        whole, expected = packed.partial(x), exact(x, weight, bias)
        summed = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
        # one rounding for each input, of 2**-24 (of a pair's two products in bf16: to odd, 2**-23)
        assert ((whole.double() - expected).abs() <= summed * inputs * 2**-23).all()
        for first, last in ((0, 1), (3, 5), (7, 13), (20, 37)):
            assert torch.equal(packed.partial(x[first:last]), whole[first:last])
        assert torch.equal(packed.times(x), whole.bfloat16())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_integers_are_exact_until_they_are_summed(library: Open, scheme: str) -> None:
    kernel = LinearKernel(library(LINEAR))
    weight = integers(scheme, 100, 160, seed=1)
    whole, x = values(weight), drawn(20, 160, seed=3)
    packed = kernel.pack(weight, None)
    expected, summed = x.double() @ whole.t(), x.double().abs() @ whole.abs().t()
    if weight.offsets is not None:  # what a sum and its offset cancel is rounded all the same
        summed += x.double().abs() @ weight.offsets.double().abs().repeat_interleave(weight.group, 1)[:, :160].t() * 2
    sums = packed.partial(x)
    assert ((sums.double() - expected).abs() <= summed * 160 * 2**-23).all()
    for first, last in ((0, 1), (1, 3), (4, 10), (0, 16)):
        assert torch.equal(packed.partial(x[first:last]), sums[first:last])


def test_experts_norms_and_gates_are_those_of_plain_products(library: Open) -> None:
    kernel, weights = LinearKernel(library(LINEAR)), [drawn(96, 64, seed=i) for i in range(3)]
    alone = [kernel.pack(weight, None, gates=True) for weight in weights]
    together = PackedMatrices(kernel, list(weights), gates=True)
    x, norm = drawn(9, 64, seed=5), drawn(64, seed=6)
    rows = torch.tensor([4, 0, 5])
    assert torch.equal(together.times(x, rows), torch.cat([alone[0].times(x[:4]), alone[2].times(x[4:])]))
    normed = (x.double() * norm.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    gate, up = exact(normed, weights[0], None).bfloat16().double().chunk(2, 1)
    expected = (torch.nn.functional.silu(gate).bfloat16().double() * up).float()
    found = alone[0].times_normed(x, norm, eps=1e-6, gated=True).float()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # a bf16 step in the norm, the sum, and the gate


@pytest.mark.parametrize("fp8", [False, True])
def test_attention_of_prompts(library: Open, fp8: bool) -> None:
    heads, starts, ends = Heads(q=4, kv=2, dim=48), [0, 0, 290], [1, 70, 300]  # two blocks of keys
    sequences = make_sequences(heads, ends, page_size=16, dtype="bfloat16")
    pool = make_pool(heads, num_pages=pages_needed(ends, 16), page_size=16, dtype="bfloat16", fp8=fp8)
    fill(pool, sequences, starts)
    kernel = paged_attention.PagedExtend(library(paged_attention.EXTEND), pool)
    outs = run_step(kernel, sequences, starts, ends, page_size=16)
    assert worst_error(outs, sequences, starts, ends) < (0.2 if fp8 else TOLERANCE["bfloat16"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_of_decode_steps(library: Open, dtype: str) -> None:
    heads, ends = Heads(q=4, kv=2, dim=48), [1, 17, 150]
    starts = [end - 1 for end in ends]
    sequences = make_sequences(heads, ends, page_size=16, dtype=dtype)
    pool = filled_pool(heads, sequences, starts)
    kernel = paged_attention.PagedDecode(library(paged_attention.DECODE), pool)
    kernel.begin(make_step(sequences, starts, ends, page_size=16, extend=False))
    turned = [torch.stack([getattr(s, name)[-1] for s in sequences]) for name in "qkv"]
    outs = kernel.attend_rotated(1, *turned, Softmax(heads.dim**-0.5)).split(1)
    assert worst_error(list(outs), sequences, starts, ends) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_of_latents(library: Open, dtype: str) -> None:
    shape, lengths = Shape(3, 48, 32), [40, 9]
    sequences = latent_sequences(shape, lengths, dtype)
    pool = latent_pool(shape, dtype, num_pages=max(max(s.pages) for s in sequences))
    kernel = LatentKernel(library(LATENTS), pool)
    kernel.begin(make_step(sequences, [0, 0], lengths, page_size=PAGE, extend=True))
    q, latents = torch.cat([s.q for s in sequences]), torch.cat([s.k[:, 0] for s in sequences])
    out = kernel.attend(1, q, latents, scale=SCALE).split(lengths)
    for one, s, length in zip(out, sequences, lengths, strict=True):
        assert (one.double() - latent_reference(shape, s, 0, length)).abs().max() < TOLERANCE[dtype]


def near(found: torch.Tensor, here: torch.Tensor) -> None:
    """fp32 sums in another order, rounded to what they are."""
    step = 2**-7 if here.dtype == torch.bfloat16 else 2**-18
    torch.testing.assert_close(found.float(), here.float(), rtol=step, atol=step)


def test_elementwise_kernels_are_those_of_this_cpu(library: Open) -> None:
    there, here = Elementwise(library(ELEMENTWISE)), elementwise()
    assert here is not None
    x, weight, wide = drawn(5, 96, seed=1), drawn(96, seed=2), drawn(5, 192, seed=3)
    near(there.rms_norm(x.clone(), weight, eps=1e-6), here.rms_norm(x.clone(), weight, eps=1e-6))
    near(there.silu_mul(wide), here.silu_mul(wide))


def state_rows(lens: Sequence[int], *, slots: int) -> StateRows:
    rows = StateRows(cast(Any, SimpleNamespace(num_slots=slots)))
    rows.begin(lens, range(len(lens) - 1, -1, -1))
    return rows


def test_recurrent_kernels_are_those_of_this_cpu(library: Open) -> None:
    lens = [3, 1]
    total, rows = sum(lens), state_rows(lens, slots=2)
    x, taps, bias = drawn(total, 64, seed=1), drawn(4, 64, seed=2).float(), drawn(64, seed=3).float()
    both: list[list[torch.Tensor]] = []
    for conv, delta, mamba in (
        (
            ConvKernel(library(CONV)),
            DeltaKernel(library(DELTA)),
            MambaKernel(library(MAMBA)),
        ),
        (conv_kernel(), delta_kernel(), mamba_kernel()),
    ):
        assert conv is not None and delta is not None and mamba is not None
        past, memory, slow = (
            drawn(2, 64, 3, seed=4),
            drawn(2, 2, 32, 32, seed=5).float(),
            drawn(2, 2, 32, 32, seed=6).float(),
        )
        found = [conv(x, taps, bias, past, rows), past]
        weights = DeltaWeights(
            decay=-bias[:2].abs(), bias=bias[2:4].contiguous(), norm=bias[:32].contiguous(), eps=1e-6
        )
        found += [
            delta(drawn(total, 128, seed=7), drawn(total, 4, seed=8), drawn(total, 64, seed=9), weights, memory, rows),
            memory,
        ]
        own = MambaWeights(
            decay=-bias[:2].abs(), bias=bias[2:4].contiguous(), skip=bias[4:6].contiguous(), norm=None, groups=1, gate_first=True,
            limits=(0.0, 100.0), eps=1e-6,
        )  # fmt: skip
        found += [
            mamba(drawn(total, 128, seed=7), drawn(total, 2, seed=8), drawn(total, 64, seed=9), own, slow, rows),
            slow,
        ]
        both.append(found)
    for there, here in zip(*both, strict=True):
        near(there, here)


def test_noise_of_samples_has_the_same_bits(library: Open) -> None:
    there, here = SampleKernel(library(SAMPLE)), sample_kernel()
    assert here is not None
    bits = torch.randint(0, 2**32, (160,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(there.noise(bits), here.noise(bits))


@pytest.mark.parametrize(("word", "masked"), [("int64", False), ("int64", True), ("int32", False), ("int16", False)])
def test_checksums_have_the_same_bits(library: Open, word: str, masked: bool) -> None:
    """Rows overlap; their last words fill no vector."""
    words = torch.randint(-(2**15), 2**15, (100,), generator=torch.Generator().manual_seed(2)).to(getattr(torch, word))
    starts, keys, bits = torch.tensor([3, 60, 7]), torch.tensor([5, -(2**62), 0]), torch.tensor([-1, 0, 255])
    asked = (words, starts, keys, 37, ODD, bits if masked else None)
    assert torch.equal(WordSums(library(CHECKSUM))(*asked), word_sums(*asked))
