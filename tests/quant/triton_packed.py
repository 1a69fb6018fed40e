"""Matrices that stay packed on a GPU, by Triton's interpreter; run by test_packed_on_gpu.py."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.kernels.triton import packed_linear
from engine.kernels.triton.packed import packed, weight_fits
from engine.kernels.triton.packed_linear import PackedLinear
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.quant.ggml import BLOCK_TYPES
from engine.quant.integers import Integers
from tests.models.reference_attend import Sequence
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_gguf import make_tiny_gguf
from tests.quant.packed_weights import integers, mxfp4, weights
from tests.quant.stored_formats import make_both

WHOLE, CUT = (32, 256), (65, 144)  # of whole tiles, and not
ROWS = (3, 17, 33)  # of the three tiles


def check(name: str, weight: Integers, dtype: torch.dtype) -> None:
    """Beside the exact product: sums, answers, dense parts; a row has its bits in any batch."""
    assert weight_fits(weight)
    bias = torch.randn(len(weight)).to(dtype)
    matrix, x = PackedLinear(weight, bias), torch.randn(max(ROWS), weight.shape[1] + 8).to(dtype)[:, :-8]
    exact = x.double() @ replace(weight, dtype=torch.float64).dense().t() + bias.double()
    every = matrix.partial(x)
    rounding = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter cuts bf16 off
    close(
        every, exact, rounding if "offsets" in name else 1e-6, name
    )  # numbers with offsets are rounded, as dense ones are
    for rows in ROWS[:-1]:
        assert torch.equal(matrix.partial(x[:rows]), every[:rows]), (name, rows)
    if dtype != torch.float32:
        close(matrix.times(x[:3]), exact[:3], rounding, name)
    with mock.patch.object(packed_linear, "MOST_ROWS", 2), mock.patch.object(packed_linear, "DENSE_BYTES", 1):
        close(matrix.times(x[:3]), exact[:3], rounding, name)


def close(found: Tensor, exact: Tensor, tolerance: float, name: str) -> None:
    worst = float((found.double() - exact).abs().max() / exact.abs().max())
    assert worst < tolerance, (name, worst)


def check_forms() -> None:
    """Groups that cut tiles do not fit; zero points take a byte of scales, if it is free."""
    assert not weight_fits(integers((8, 48), 4, 24, zeros=False, dtype=torch.float32))
    blocks = mxfp4((8, 64), torch.float32)
    weight = integers((8, 64), 4, 32, zeros=True, dtype=torch.float32)
    assert weight.offsets is not None
    scales = weight.scales / 3
    crowded = replace(weight, scales=scales, offsets=(weight.offsets / weight.scales) * scales)
    none = replace(weight, offsets=None)
    for forms, zeros in (([none], ""), ([none, weight], "points"), ([weight, crowded], "offsets")):
        found = packed([*forms], inputs=256)
        assert found is not None and found.form is not None and found.form.zeros == zeros
    assert packed([weight, blocks], inputs=256) is None and packed([weight, weight.dense()], inputs=256) is None


PROMPT = [3, 1, 4, 1, 5]
STORED = ("awq", "int8", "fp8-blocks", "fp8-one-scale")  # others are read as these are
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}


def check_checkpoint(path: str, **flags: str) -> None:
    """A model of packed matrices gives the tokens of the floats that they stand for."""

    def loaded() -> DenseDecoder:
        return load_model(path, load_model_config(path), dtype="float32", device="cpu", progress=False, **flags)  # type: ignore[arg-type]

    expected = Sequence(loaded()).extend(PROMPT)
    with (
        mock.patch("engine.layers.linear.takes_triton", lambda _: True),
        mock.patch("engine.models.quantized_tensors.takes_triton", lambda _: True),
    ):
        model = loaded()
    assert all(isinstance(matrix_of(site.linear), PackedLinear) for site in model.linear_sites()), (path, flags)
    logits = Sequence(model).extend(PROMPT)
    assert torch.equal(logits.argmax(1), expected.argmax(1)) and (logits - expected).abs().max() < 1e-4, (path, flags)


def check_checkpoints(folder: Path) -> None:
    for name in STORED:
        check_checkpoint(make_both(folder / name, name, "qwen3", **SIZES)[0])
    plain = make_tiny_checkpoint(folder / "floats", "qwen3", **SIZES)
    for scheme in ("int8wo", "int4wo-64"):
        check_checkpoint(plain, quantization=scheme)
    for kind in BLOCK_TYPES:
        check_checkpoint(str(make_tiny_gguf(folder / kind, "llama", kind, num_hidden_layers=1)[0]))


def matrix_of(linear: object) -> object:
    return linear._matrix  # type: ignore[attr-defined]


def main() -> None:
    torch.manual_seed(1)
    with mock.patch.object(packed_linear, "SPLIT_TILES", 1):
        for name, weight in weights(CUT, torch.float32).items():
            check(name, weight, torch.float32)
        for name in ("fp8, blocks", "int8", "int4, zeros", "int4, offsets", "mxfp4"):
            check(name, weights(WHOLE, torch.bfloat16)[name], torch.bfloat16)
    check_forms()
    with tempfile.TemporaryDirectory(prefix="tandem-packed-") as folder:
        check_checkpoints(Path(folder))


if __name__ == "__main__":
    main()
