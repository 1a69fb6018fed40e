"""KV of 8 bits: what a row becomes, and that every reader sees the same values: the bits are those of a bf16 cache that holds them."""

from itertools import pairwise

import pytest
import torch

from engine.attention.backend import AttentionBackend, make_attention_backend
from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kernels.paged_attention import Softmax
from engine.kv.cache_spec import CacheSpec
from engine.kv.fp8 import BAD_CODE, MIN_EXPONENT, dequantized, quantized
from engine.kv.kv_pool import KVPool
from tests.attention.attention_cases import (
    Heads,
    Sequence,
    make_pool,
    make_sequences,
    pages_needed,
    run_step,
    worst_error,
)

STARTS, ENDS = [0, 76, 40, 299, 0, 511], [50, 77, 90, 300, 1, 530]
PAGE = 16


def pool_of(
    heads: Heads,
    sequences: list[Sequence],
    *,
    fp8: bool = True,
    units: int = 1,
    window: int = 0,
    dtype: str = "bfloat16",
) -> KVPool:
    num_pages = pages_needed([len(s.q) for s in sequences], PAGE)
    return make_pool(heads, num_pages=num_pages, page_size=PAGE, dtype=dtype, units=units, window=window, fp8=fp8)


def steps(backend: AttentionBackend, sequences: list[Sequence], softmax: Softmax | None = None) -> list[torch.Tensor]:
    """Prompts, those whose start is 0 whole and the others behind a prefix, and then all last tokens as decodes."""
    before = [(i, start) for i, start in enumerate(STARTS) if start]
    prefixes = [sequences[i] for i, _ in before]
    run_step(backend, prefixes, [0] * len(before), [start for _, start in before], page_size=PAGE, softmax=softmax)
    outs = run_step(backend, sequences, STARTS, ENDS, page_size=PAGE, softmax=softmax, riders=[])
    last = [end - 1 for end in ENDS]
    return outs + run_step(backend, sequences, last, ENDS, page_size=PAGE, extend=False, softmax=softmax)


def as_kept(sequences: list[Sequence]) -> list[Sequence]:
    """With the K and V that a cache of 8 bits gives back."""
    return [Sequence(s.q, *(dequantized(*quantized(x), x.dtype) for x in (s.k, s.v)), pages=s.pages) for s in sequences]


def test_a_row_keeps_its_numbers_to_a_16th_and_zeros_and_its_size() -> None:
    rows = torch.randn(400, 64) * torch.logspace(-20, 20, 400)[:, None]
    codes, exponents = quantized(rows)
    back = dequantized(codes, exponents, torch.float32)
    largest = rows.abs().amax(-1, keepdim=True)
    assert ((back - rows).abs() <= rows.abs() / 16 + largest * 2.0**-18).all()
    assert codes.dtype == exponents.dtype == torch.uint8 and codes.shape == rows.shape and exponents.shape == (400,)
    assert (dequantized(codes, exponents, torch.bfloat16).float() == back).all(), "bf16 holds every such value"
    scale = torch.ldexp(torch.ones(400), exponents.int() - 127)
    assert (largest[:, 0] <= 448 * scale).all() and (largest[:, 0] > 224 * scale).all(), "the least power of two"
    assert not dequantized(*quantized(torch.zeros(1, 16)), torch.float32).any()
    assert quantized(torch.full((1, 16), 1e-38))[1] == MIN_EXPONENT
    assert torch.equal(quantized(torch.tensor([448.0, 1.0])[None])[1], torch.tensor([127], dtype=torch.uint8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so(bad: float) -> None:
    codes, exponents = quantized(torch.tensor([[1.0, bad, 2.0, 3.0]]))
    assert (codes == BAD_CODE).all() and dequantized(codes, exponents, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("units", [1, 2])
def test_codes_lie_behind_one_another_and_the_exponents_of_a_token_behind_its_heads(units: int) -> None:
    spec = CacheSpec(4, 16, "bfloat16", fp8=True)
    pool = KVPool([spec] * 2, num_pages=3, page_size=PAGE, device="cpu", units=units)
    assert spec.bytes_per_token() == 2 * 4 * 17 and pool.page_bytes == 2 * PAGE * spec.bytes_per_token()
    k, v = torch.randn(2, 1, 4, 16).bfloat16()
    pool.write(1, torch.tensor([2]), torch.tensor([5]), k, v)
    heads, unit = 4 // units, pool.buffer[2 * pool.page_bytes :][: pool.unit_bytes]
    token = unit[2 * PAGE * heads * 17 + 5 * heads * 17 :][: heads * 17]  # K of layer 1
    codes, exponents = quantized(k[0, :heads])
    assert torch.equal(token, torch.cat((codes.flatten(), exponents)))
    assert torch.equal(pool.read(1, torch.tensor([2]))[1][5], pool.rounded(1, v)[0])


@pytest.mark.parametrize(
    "softmax", [None, Softmax(0.1, cap=20.0, sinks=torch.linspace(-2, 2, 6))], ids=["plain", "gpt"]
)
@pytest.mark.parametrize(("dim", "window"), [(128, 0), (48, 0), (80, 70), (128, 300)])
def test_the_kernels_have_the_bits_of_a_bf16_cache_of_the_same_values(
    dim: int, window: int, softmax: Softmax | None
) -> None:
    heads = Heads(q=6, kv=2, dim=dim)
    sequences = make_sequences(heads, ENDS, page_size=PAGE, dtype="bfloat16")
    pools = [pool_of(heads, sequences, fp8=fp8, window=window) for fp8 in (True, False)]
    backends = [make_attention_backend("cpu", pool, num_heads=heads.q) for pool in pools]
    ours = steps(backends[0], sequences, softmax)
    theirs = steps(backends[1], as_kept(sequences), softmax)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("units", [1, 4])
def test_the_kernels_write_the_bytes_of_torch(units: int, threads: int) -> None:
    heads = Heads(q=8, kv=4, dim=64)
    sequences = make_sequences(heads, ENDS, page_size=PAGE, dtype="bfloat16")
    for scale, s in zip((1.0, 1e-30, 1e30, 3e38, 1e-45, 0.0), sequences, strict=True):
        s.k.mul_(scale)
        s.v[:, 1].mul_(scale)
    sequences[2].v[41, 3, 7] = torch.nan
    pools = [pool_of(heads, sequences, units=units) for _ in range(2)]
    try:
        torch.set_num_threads(threads)
        for name, pool in zip(("cpu", "torch"), pools, strict=True):
            steps(make_attention_backend(name, pool, num_heads=heads.q), sequences)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(pools[0].buffer, pools[1].buffer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_computes_with_the_values_that_are_kept(dtype: str) -> None:
    heads = Heads(q=6, kv=2, dim=24)
    sequences = make_sequences(heads, ENDS, page_size=PAGE, dtype=dtype)
    outs = steps(TorchBackend(pool_of(heads, sequences, dtype=dtype)), sequences)
    kept = as_kept(sequences)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    assert worst_error(outs[: len(ENDS)], kept, STARTS, ENDS) < tolerance
    assert worst_error(outs[: len(ENDS)], sequences, STARTS, ENDS) > 10 * tolerance or dtype == "bfloat16"


def test_a_prompt_in_chunks_has_the_bits_of_the_whole() -> None:
    heads = Heads(q=4, kv=2, dim=64)
    (sequence,) = make_sequences(heads, [600], page_size=PAGE, dtype="bfloat16")

    def computed(cuts: list[int]) -> torch.Tensor:
        backend = CpuBackend(pool_of(heads, [sequence]))
        if not backend.has_prompt_kernel:
            pytest.skip("torch's products depend on the rows")
        return torch.cat(
            [run_step(backend, [sequence], [a], [b], page_size=PAGE, riders=[])[0] for a, b in pairwise(cuts)]
        )

    whole = computed([0, 600])
    assert all(torch.equal(computed(cuts), whole) for cuts in ([0, 300, 600], [0, 1, 17, 600], [0, 256, 599, 600]))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("extend", [True, False], ids=["prompt", "decode"])
def test_a_nan_stays_visible_and_in_its_request(extend: bool, side: str) -> None:
    heads = Heads(q=2, kv=1, dim=32)
    sequences = make_sequences(heads, [300, 300], page_size=PAGE, dtype="bfloat16")
    getattr(sequences[0], side)[270, 0, 0] = torch.nan
    backend = make_attention_backend("cpu", pool_of(heads, sequences), num_heads=heads.q)
    poisoned, clean = run_step(backend, sequences, [0, 0], [300, 300], page_size=PAGE)
    if not extend:
        poisoned, clean = run_step(backend, sequences, [299, 299], [300, 300], page_size=PAGE, extend=False)
    assert poisoned[-1].isnan().any() and not clean.isnan().any()
