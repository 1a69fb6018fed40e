"""Cases of the Triton elementwise kernels by the interpreter, beside torch's operators; run by triton_numerics.py."""

from collections.abc import Callable

import torch
from torch.nn import functional

from engine.kernels.triton_elementwise import TritonElementwise
from engine.layers.rope import apply_rope

TOKENS, HEADS, BEHIND = 3, 9, 2  # 9: a tile of heads and one more
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-5}  # the interpreter cuts bf16 off where a GPU rounds


def check_elementwise(guards: Callable[[], None]) -> None:
    """`guards`: raises where something was written outside the results so far."""
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        for width in (24, 64):
            _norms(width, dtype, generator)
            guards()
        for dim in (16, 24):
            _heads(dim, dtype, generator, normed=True)
            _heads(dim, dtype, generator, normed=False)
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


def _heads(dim: int, dtype: torch.dtype, generator: torch.Generator, *, normed: bool) -> None:
    whole = torch.randn(TOKENS, HEADS + BEHIND, dim, generator=generator).to(dtype)
    weight = torch.randn(HEADS, dim, generator=generator).to(dtype) if normed else None
    table = torch.randn(TOKENS, 2, 1, dim, generator=generator).to(dtype)
    turn = table[:, 0], table[:, 1]
    x, behind = whole[:, :HEADS], whole[:, HEADS:].clone()
    expected = x if weight is None else functional.rms_norm(x, (dim,), None, 1e-6) * weight
    expected = apply_rope(expected, *turn)
    TritonElementwise().norm_turn(x, turn, weight=weight, eps=1e-6)
    assert torch.equal(whole[:, HEADS:], behind), "v was turned"
    _close(x, expected.float(), dtype)


def _gate(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = torch.randn(TOKENS, 2 * 1100, generator=generator).to(dtype)  # 1100: more than a tile
    x[0, 0] = -200.0  # e^200 is no float
    gate, up = x.split(1100, dim=-1)
    _close(TritonElementwise().silu_mul(x), (functional.silu(gate) * up).float(), dtype)


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
