"""Cases of Triton's norms, turns and gates by the interpreter, beside torch's operators; run by triton_numerics.py."""

from collections.abc import Callable

import torch
from torch.nn import functional

from engine.kernels.paged_attention import Softmax
from engine.kernels.triton.elementwise import TritonElementwise, whole_norm
from engine.kernels.triton.latent_write import latent_write
from engine.kernels.triton.rope_write import rope_write
from engine.layers.latents import NewLatents
from engine.layers.linear import DeferredNorm, NoNorm, RMSNorm
from engine.layers.rope import NormedRope, Unturned
from tests.attention.attention_cases import Heads, make_pool
from tests.attention.test_latents import Shape, latent_pool

TOKENS = 3
HEADS = (9, 10)  # of q, of k and of v: more than a tile
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-5}  # the interpreter cuts bf16 off where a GPU rounds


def check_elementwise(guards: Callable[[], None]) -> None:
    """`guards`: raises where something was written outside the results so far."""
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        for width in (24, 64):
            _norms(width, dtype, generator)
            guards()
        for dim in (16, 24):
            for normed in (True, False):
                _heads(Heads(*HEADS, dim), dtype, generator, normed=normed)
        for rank, rest in ((24, 16), (32, 6)):
            _latents(rank, rest, dtype, generator)
        _gate(dtype, generator)
        guards()


def _norms(width: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, delta, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (TOKENS, TOKENS, 1))
    total = x + delta
    expected = functional.rms_norm(total.float(), (width,), weight[0].float(), 1e-6)
    found = TritonElementwise().rms_norm(x, weight[0], eps=1e-6, delta=delta)
    _close(x, total.float(), dtype)
    _close(found, expected, dtype)
    assert torch.equal(TritonElementwise().rms_norm(x, weight[0], eps=1e-6), found)
    expected = functional.rms_norm(total.float(), (width,), weight[0].float() + 1.0, 1e-6)
    _close(TritonElementwise().rms_norm(x, weight[0], eps=1e-6, offset=1.0), expected, dtype)
    inner, summed = torch.randn(width, generator=generator).to(dtype), x.clone()
    after = functional.rms_norm(delta.float(), (width,), inner.float() + 1.0, 1e-5).to(dtype)
    behind = DeferredNorm(RMSNorm(inner, eps=1e-5, offset=1.0), delta)
    found_behind = RMSNorm(weight[0], eps=1e-6, offset=0.5).of_sum(summed, behind)
    _close(summed, (x + after).float(), dtype)
    _close(found_behind, functional.rms_norm(summed.float(), (width,), weight[0].float() + 0.5, 1e-6), dtype)
    summed = x.clone()
    assert NoNorm().of_sum(summed, behind) is summed
    _close(summed, (x + after).float(), dtype)
    both, weights = torch.cat((x, delta, x), 1), (inner, weight[0][: width - 8])
    normed = both.clone()
    whole_norm(normed, weights, eps=1e-6)
    _close(normed[:, :width], functional.rms_norm(x.float(), (width,), inner.float(), 1e-6), dtype)
    of_k = functional.rms_norm(delta[:, :-8].float(), (width - 8,), weights[1].float(), 1e-6)
    _close(normed[:, width : 2 * width - 8], of_k, dtype)
    assert torch.equal(normed[:, 2 * width - 8 :], both[:, 2 * width - 8 :])
    part = torch.cat((delta, x), 1)[:, width:]
    assert torch.equal(TritonElementwise().rms_norm(part, weight[0], eps=1e-6), found), "of columns of a wider tensor"


def _heads(heads: Heads, dtype: torch.dtype, generator: torch.Generator, *, normed: bool) -> None:
    """Two tokens of one page and the first of another. The rows of q, k and v are part of wider ones."""
    whole = torch.randn(TOKENS, heads.q + 2 * heads.kv + 1, heads.dim, generator=generator).to(dtype)
    weight = torch.randn(heads.q + heads.kv, heads.dim, generator=generator).to(dtype) if normed else None
    table = torch.randn(TOKENS, 2, 1, heads.dim, generator=generator).to(dtype)
    qkv, before = whole[:, :-1], whole.clone()
    rope = NormedRope(weight, like=torch.empty(1), eps=1e-6)
    turn = (table[:, 0].float(), table[:, 1].float())
    q, k, v = Unturned(qkv.float(), heads.kv, rope, turn, Softmax(heads.dim**-0.5)).turned()
    pools = [make_pool(heads, num_pages=3, page_size=4, dtype=NAMES[dtype]) for _ in range(2)]
    pages, offsets = torch.tensor([2, 2, 1]), torch.tensor([1, 2, 0])
    cache = pools[0].k(1), pools[0].v(1)
    turn = table[:, 0], table[:, 1]
    found = rope_write(qkv, turn, *cache, weight=weight, eps=1e-6, pages=pages, offsets=offsets)
    _close(found, q, dtype)
    assert torch.equal(whole[:, heads.q :], before[:, heads.q :]), "more than q was turned in place"
    assert torch.equal(cache[1][pages, offsets], qkv[:, -heads.kv :])
    _close(cache[0][pages, offsets], k, dtype)
    pools[1].write(1, pages, offsets, cache[0][pages, offsets], v)
    assert torch.equal(pools[0].buffer, pools[1].buffer), "K or V lies where no new token has its place"


def _latents(rank: int, rest: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Two tokens of one page and the first of another, with more heads than a tile, as parts of wider tensors."""
    wide = torch.randn(TOKENS, HEADS[0], 5 + rest, generator=generator).to(dtype)
    rows = torch.randn(TOKENS, 3 + rank + rest, generator=generator).to(dtype)
    weight = torch.randn(rank, generator=generator).to(dtype)
    table = torch.randn(TOKENS, 2, 1, rest, generator=generator).to(dtype)
    q = torch.randn(TOKENS, HEADS[0], rank + rest, generator=generator).to(dtype)
    turn, rotary, latents, absorbed = (table[:, 0], table[:, 1]), wide[:, :, 5:], rows[:, 3:], q.clone()
    floats = q.float(), rotary.float(), latents.float(), RMSNorm(weight.float(), eps=1e-6)
    new = NewLatents(*floats, (turn[0].float(), turn[1].float()), 1.0).rotated()
    pools = [latent_pool(Shape(HEADS[0], rank + rest, rank), NAMES[dtype], num_pages=3) for _ in range(2)]
    pages, offsets = torch.tensor([2, 2, 1]), torch.tensor([1, 2, 0])
    cache = pools[0].k(1)
    found = latent_write(q, rotary, latents, turn, cache, norm=(weight, 1e-6), places=(pages, offsets))
    assert found is q and torch.equal(q[:, :, :rank], absorbed[:, :, :rank]), "an absorbed query was written"
    _close(found, new.q, dtype)
    kept = cache[pages, offsets]
    _close(kept[:, 0], new.latents, dtype)
    pools[1].write(1, pages, offsets, kept, kept)
    assert torch.equal(pools[0].buffer, pools[1].buffer), "latents lie where no new token has its place"


def _gate(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = torch.randn(TOKENS, 2 * 1100, generator=generator).to(dtype)  # 1100: more than a tile
    x[0, 0] = -200.0  # e^200 is no float
    gate, up = x.split(1100, dim=-1)
    _close(TritonElementwise().silu_mul(x), (functional.silu(gate) * up).float(), dtype)
    _close(TritonElementwise().gelu_mul(x), (functional.gelu(gate, approximate="tanh") * up).float(), dtype)


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
