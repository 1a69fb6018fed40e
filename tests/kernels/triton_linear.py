"""Decode products of GPUs by Triton's interpreter; run by test_linear_on_gpu.py."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.kernels.triton import packed_linear
from engine.kernels.triton.linear import MAX_ROWS, StreamedLinear, counters
from engine.layers import linear as layers
from engine.layers.linear import GATES, DeferredProduct, Linear, RMSNorm, RowLinear
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.parallel.collectives import SINGLE_RANK
from tests.models.reference_attend import Sequence
from tests.models.tiny_checkpoints import make_tiny_checkpoint

CUT, WHOLE, SHORT = (200, 616), (128, 512), (72, 80)  # outputs, inputs: of whole tiles, or not; a single split
BATCHES = (1, 2, 15, 16, 17, 33, 64)  # of all tiles
EPS, OFFSET = 1e-5, 1.0
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8}  # the interpreter cuts bf16 off


def check_sizes(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Beside float64: plain, gated and added; a row has its bits in any batch, at any place."""
    weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)
    norm = torch.rand(outputs).to(dtype)
    after = StreamedLinear((torch.randn(48, outputs) / outputs**0.5).to(dtype), None)
    matrix = StreamedLinear(weight, bias)
    x, residual = torch.randn(MAX_ROWS, inputs + 8).to(dtype)[:, :-8], torch.randn(MAX_ROWS, outputs).to(dtype)

    def added(rows: slice) -> list[Tensor]:
        sums = residual[rows].clone()
        weighed = matrix.add_to(sums, x[rows], norm=norm, eps=EPS, offset=OFFSET)
        return [sums, weighed.rows, weighed.squares.t(), after.times(weighed), after.times(weighed, gate="silu")]

    works: dict[str, Callable[[slice], list[Tensor]]] = {
        "plain": lambda rows: [matrix.times(x[rows]), matrix.times(x[rows], dtype=torch.float32)],
        "gated": lambda rows: [matrix.times(x[rows], gate=gate) for gate in ("silu", "gelu_tanh")],
        "added": added,
    }
    found = {name: work(slice(MAX_ROWS)) for name, work in works.items()}
    exact = exactly(x, weight, bias, residual, norm, after._weight)
    for name, values in found.items():
        for i, (value, right) in enumerate(zip(values, exact[name], strict=True)):
            worst = float((value.double() - right).abs().max() / right.abs().max())
            assert worst < ROUNDING[dtype], (dtype, outputs, name, i, worst)
        for batch in BATCHES:
            for first in {0, MAX_ROWS - batch}:
                rows = slice(first, first + batch)
                for value, whole in zip(works[name](rows), values, strict=True):
                    assert torch.equal(value, whole[rows]), (dtype, outputs, name, batch, first)
    assert not counters(x.device).any(), "splits are still counted"


def exactly(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, norm: Tensor, after: Tensor
) -> dict[str, list[Tensor]]:
    x, weight, bias, residual, norm, after = (each.double() for each in (x, weight, bias, residual, norm, after))
    product = x @ weight.t() + bias
    sums = residual + product
    squares = torch.stack([part.square().sum(1) for part in sums.split(64, 1)], 1)
    weighed = sums * (norm + OFFSET)
    last = weighed * torch.rsqrt(sums.square().mean(1, keepdim=True) + EPS) @ after.t()
    return {
        "plain": [product, product],
        "gated": [GATES[gate](product) for gate in ("silu", "gelu_tanh")],
        "added": [sums, weighed, squares, last, GATES["silu"](last)],
    }


def check_ways() -> None:
    """Who takes which way: adapters, ranks, fp16, many rows and other norms have the plain one."""
    weight, x = torch.randn(64, 64), torch.randn(3, 64)
    linear, many = Linear(weight), torch.randn(MAX_ROWS + 1, 64)
    assert isinstance(linear.later(x), DeferredProduct)
    assert isinstance(linear.later(many), Tensor) and torch.equal(linear(many), many @ weight.t())
    assert isinstance(linear.later(x[:0]), Tensor)
    assert isinstance(Linear(weight.half()).later(x.half()), Tensor)
    assert isinstance(RowLinear(weight, None, collectives=SINGLE_RANK).later(x), Tensor)
    norms = [RMSNorm(torch.rand(64), eps=EPS, offset=offset) for offset in (0.0, 1.0)]
    for norm in (*norms, layers.LayerNorm(torch.rand(64), None, eps=EPS), layers.NoNorm()):
        fused, plain = x.clone(), x.clone()
        right = weight @ norm.of_sum(plain, x @ weight.t()).t()
        torch.testing.assert_close(linear.of_norm(norm, fused, linear.later(x)), right.t(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(fused, plain)
    linear.delta = lambda _, y: y.add_(1)
    assert isinstance(linear.later(x), Tensor)
    torch.testing.assert_close(linear.of_norm(norms[0], x.clone(), None), norms[0](x) @ weight.t() + 1)


PROMPT = [3, 1, 4, 1, 5]
FAMILIES = ("qwen2", "gemma", "gemma2", "granite", "phi", "qwen3_moe", "falcon_h1", "qwen3_5_text", "deepseek_v2")


def check_model(folder: Path, family: str) -> None:
    """A model gives the logits of the CPU's, after a prompt and after a token."""
    path = make_tiny_checkpoint(folder, family)

    def loaded() -> DenseDecoder:
        return load_model(path, load_model_config(path), dtype="float32", device="cpu", progress=False)

    expected = Sequence(loaded())
    with mock.patch.object(layers, "_matrix", lambda weight, bias, _: layers._GpuMatrix(weight, bias)):
        found = Sequence(loaded())
    for ids in (PROMPT, [9]):
        torch.testing.assert_close(found.extend(ids), expected.extend(ids), rtol=1e-4, atol=1e-4, msg=family)


def main() -> None:
    torch.manual_seed(1)
    with mock.patch.object(packed_linear, "SPLIT_TILES", 1):
        check_sizes(torch.float32, *CUT)
        check_sizes(torch.bfloat16, *WHOLE)
    check_sizes(torch.float16, *SHORT)
    with mock.patch.object(layers, "_matrix", lambda weight, bias, _: layers._GpuMatrix(weight, bias)):
        check_ways()
    with tempfile.TemporaryDirectory(prefix="tandem-linear-") as folder:
        for family in FAMILIES:
            check_model(Path(folder) / family, family)


if __name__ == "__main__":
    main()
