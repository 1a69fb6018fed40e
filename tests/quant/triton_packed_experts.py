"""Experts that stay packed on a GPU, by Triton's interpreter; run by test_packed_on_gpu.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.kernels.triton import experts as kernels
from engine.kernels.triton.experts import ExpertTiles
from engine.layers import fused_experts
from engine.layers.experts import BiasedExperts, Experts
from engine.layers.fused_experts import Clamped, FusedExperts
from engine.model_files.experts_config import ClampedGate
from engine.quant.integers import Integers, Weight, dense_of
from tests.attention.triton.triton_numerics import guarded
from tests.quant.packed_weights import weights
from tests.quant.triton_packed import close

COUNT, HIDDEN, WIDTH, PER_TOKEN = 5, 96, 64, 3
TOKENS = (2, 9)  # pairs that are blocks, and sorted ones
GATE = ClampedGate(alpha=1.7, limit=2.0)
TILES = ExpertTiles(rows=16, columns=32, depth=32, warps=4, stages=2)


def experts_of(form: str, dtype: torch.dtype) -> tuple[list[Weight], list[Weight]]:
    """Gate and up of each expert, and down, of which numbers of all sizes would overflow."""
    return tuple(  # type: ignore[return-value]
        [weights(size, dtype)[form].times(0.01 if "mxfp4" not in form else 2.0**-5) for _ in range(COUNT)]
        for size in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )


def exact(
    x: Tensor, chosen: Tensor, shares: Tensor, parts: tuple[list[Weight], list[Weight]], clamped: Clamped | None
) -> Tensor:
    """In float64."""
    both, down = ([wide(matrix) for matrix in of] for of in parts)
    total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, rank in [(token, rank) for token in range(len(x)) for rank in range(PER_TOKEN)]:
        expert = int(chosen[token, rank])
        sums = both[expert] @ x[token].double()
        if clamped is None:
            answer = down[expert] @ (torch.nn.functional.silu(sums[:WIDTH]) * sums[WIDTH:])
        else:
            sums = sums + clamped.gate_up_bias[expert].double()
            gate, up = sums[::2].clamp(max=GATE.limit), sums[1::2].clamp(-GATE.limit, GATE.limit)
            answer = down[expert] @ ((up + 1) * gate * torch.sigmoid(GATE.alpha * gate))
            assert clamped.down_bias is not None
            answer = answer + clamped.down_bias[expert].double()
        total[token] += shares[token, rank] * answer
    return total


def wide(matrix: Weight) -> Tensor:
    return replace(matrix, dtype=torch.float64).dense() if isinstance(matrix, Integers) else matrix.double()


def check_form(form: str, *, gated: bool, dtype: torch.dtype = torch.float32) -> None:
    """Beside the exact answers, and those of a CPU; a row has its bits in any step, also that of a long prompt."""
    parts = experts_of(form, dtype)
    clamped = None if gated else Clamped(torch.randn(COUNT, 2 * WIDTH), torch.randn(COUNT, HIDDEN), GATE)
    experts = FusedExperts([*parts[0]], [*parts[1]], segments=1, clamped=clamped)
    assert experts._gate_up.form is not None and experts._down.form is not None
    x = torch.randn(TOKENS[1], HIDDEN).to(dtype)
    chosen = torch.stack([torch.randperm(COUNT)[:PER_TOKEN] for _ in x]).int()
    shares, shared = torch.rand(len(x), PER_TOKEN), torch.randn(len(x), HIDDEN)
    expected = exact(x, chosen, shares, parts, clamped) + shared
    tolerance = 2e-6 if dtype == torch.float32 else 2**-6  # the gated numbers are rounded

    def answers(tokens: slice) -> Tensor:
        of_shared = ([shared[tokens].contiguous()], None)
        (found,) = experts.total(x[tokens], chosen[tokens].contiguous(), shares[tokens], of_shared, dtype=torch.float32)
        guarded.check()
        return found

    every = answers(slice(None))
    close(every, expected, tolerance, form)
    few = slice(0, TOKENS[0])
    assert torch.equal(answers(few), every[few]), form
    if "4" in form:
        with tiles(replace(TILES, rows=64, columns=128)):
            assert torch.equal(answers(slice(None)), every), form
    if dtype == torch.float32:
        check_sorted_rows(experts, parts, clamped, x)


def check_sorted_rows(
    experts: FusedExperts, parts: tuple[list[Weight], list[Weight]], clamped: Clamped | None, x: Tensor
) -> None:
    """As the ranks of expert parallelism call them, beside a CPU's experts of floats."""
    floats = [[dense_of(matrix) for matrix in of] for of in parts]
    plain: Callable[[Tensor, Tensor], list[Tensor]]
    if clamped is None:
        plain = Experts(*floats, segments=1)  # type: ignore[arg-type]
    else:
        (both, down), gate = floats, clamped.gate
        own = {"alpha": gate.alpha, "limit": gate.limit, "segments": 1}
        plain = BiasedExperts(both, clamped.gate_up_bias, down, clamped.down_bias, **own)  # type: ignore[arg-type]
    rows = torch.tensor([3, 0, 2, 1, len(x) - 6])
    (found,), (expected,) = experts(x, rows), plain(x, rows)
    close(found, expected.double(), 1e-5, "sorted rows")


@contextmanager
def tiles(found: ExpertTiles) -> Iterator[None]:
    with mock.patch.object(fused_experts, "expert_tiles", lambda *_, **__: found):
        yield


def main() -> None:
    torch.manual_seed(1)
    setattr(kernels, "torch", guarded)  # noqa: B010
    kernels.FEW_PAIRS, kernels.SORT_TILE, kernels.SUM_TILE = TOKENS[0] * PER_TOKEN, 16, 32
    for form in weights((64, 64), torch.float32):
        check_form(form, gated=True)
    for form in ("mxfp4", "fp8, outputs"):
        check_form(form, gated=False)
    check_form("int4, zeros", gated=True, dtype=torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
