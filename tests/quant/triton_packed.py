"""Matrices that stay packed on a GPU, by Triton's interpreter; run by test_packed_on_gpu.py."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.kernels.triton import packed_linear
from engine.kernels.triton.packed_linear import PackedLinear, weight_fits
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.quant.integers import Integers, mxfp4_codes
from tests.models.reference_attend import Sequence
from tests.quant.stored_formats import make_both

Size = tuple[int, int]  # outputs, inputs
WHOLE, CUT = (32, 256), (65, 144)  # of whole tiles, and not
ROWS = (3, 17, 33)  # of the three tiles


def integers(size: Size, bits: int, group: int, *, zeros: bool, dtype: torch.dtype) -> Integers:
    """All values of `bits`; zero points and fp16 scales as in a checkpoint."""
    half, (outputs, inputs) = 1 << (bits - 1), size
    values = torch.randint(-half, half, size, dtype=torch.int8)
    scales = (torch.rand(outputs, -(-inputs // group)) + 0.5).half().float()
    offsets = -torch.randint(-half, half, scales.shape) * scales if zeros else None
    return Integers(values, scales, offsets, bits, group, dtype)


def fp8(size: Size, group: int, rows: int, dtype: torch.dtype) -> Integers:
    """All numbers of e4m3; a scale for `rows` outputs."""
    numbers = torch.randint(0, 256, size, dtype=torch.uint8)
    numbers[numbers & 127 == 127] = 1  # NaN
    scales = torch.rand(-(-size[0] // rows), -(-size[1] // group)).repeat_interleave(rows, dim=0)[: size[0]]
    return Integers(numbers.view(torch.float8_e4m3fn), scales.contiguous(), None, 8, group, dtype)


def mxfp4(size: Size, dtype: torch.dtype) -> Integers:
    blocks = torch.randint(0, 256, (size[0], size[1] // 32, 16), dtype=torch.uint8)
    return mxfp4_codes(blocks, torch.randint(120, 131, blocks.shape[:2], dtype=torch.uint8), dtype=dtype)


def weights(size: Size, dtype: torch.dtype) -> dict[str, Integers]:
    inputs = size[1]
    return {
        "fp8, blocks": fp8(size, 128, 64, dtype),
        "fp8, outputs": fp8(size, inputs, 1, dtype),
        "int8": integers(size, 8, inputs, zeros=False, dtype=dtype),
        "int8, zeros": integers(size, 8, 32, zeros=True, dtype=dtype),
        "int4": integers(size, 4, 32, zeros=False, dtype=dtype),
        "int4, zeros": integers(size, 4, 64, zeros=True, dtype=dtype),
        "int4, one group": integers(size, 4, inputs, zeros=True, dtype=dtype),
        "mxfp4": mxfp4(size, dtype),
    }


def check(name: str, weight: Integers, dtype: torch.dtype) -> None:
    """Beside the exact product: sums, answers, dense parts; a row has its bits in any batch."""
    assert weight_fits(weight)
    bias = torch.randn(len(weight)).to(dtype)
    matrix, x = PackedLinear(weight, bias), torch.randn(max(ROWS), weight.shape[1] + 8).to(dtype)[:, :-8]
    exact = x.double() @ replace(weight, dtype=torch.float64).dense().t() + bias.double()
    every = matrix.partial(x)
    close(every, exact, 1e-6, name)
    for rows in ROWS[:-1]:
        assert torch.equal(matrix.partial(x[:rows]), every[:rows]), (name, rows)
    rounding = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter cuts bf16 off
    if dtype != torch.float32:
        close(matrix.times(x[:3]), exact[:3], rounding, name)
    with mock.patch.object(packed_linear, "MOST_ROWS", 2), mock.patch.object(packed_linear, "DENSE_BYTES", 1):
        close(matrix.times(x[:3]), exact[:3], rounding, name)


def close(found: Tensor, exact: Tensor, tolerance: float, name: str) -> None:
    worst = float((found.double() - exact).abs().max() / exact.abs().max())
    assert worst < tolerance, (name, worst)


def check_misfits() -> None:
    """Groups that cut tiles; offsets that are no zero points; scales without room for them."""
    assert not weight_fits(integers((8, 48), 4, 24, zeros=False, dtype=torch.float32))
    weight = integers((8, 64), 4, 32, zeros=True, dtype=torch.float32)
    assert weight.offsets is not None
    assert weight_fits(weight) and not weight_fits(replace(weight, offsets=weight.offsets + 0.1))
    scales = weight.scales / 3
    assert not weight_fits(replace(weight, scales=scales, offsets=(weight.offsets / weight.scales) * scales))


PROMPT = [3, 1, 4, 1, 5]
STORED = ("awq", "int8", "fp8-blocks", "fp8-one-scale")  # others are read as these are


def check_checkpoint(folder: Path, name: str) -> None:
    """A model of packed matrices gives the tokens of the floats that they stand for."""
    stored, _ = make_both(folder, name, "qwen3", hidden_size=128, intermediate_size=192, num_hidden_layers=1)

    def loaded() -> DenseDecoder:
        return load_model(stored, load_model_config(stored), dtype="float32", device="cpu", progress=False)

    expected = Sequence(loaded()).extend(PROMPT)
    with (
        mock.patch("engine.layers.linear.takes_triton", lambda _: True),
        mock.patch("engine.models.quantized_tensors.takes_triton", lambda _: True),
    ):
        model = loaded()
    assert all(isinstance(matrix_of(site.linear), PackedLinear) for site in model.linear_sites()), name
    logits = Sequence(model).extend(PROMPT)
    assert torch.equal(logits.argmax(1), expected.argmax(1)) and (logits - expected).abs().max() < 1e-4, name


def matrix_of(linear: object) -> object:
    return linear._matrix  # type: ignore[attr-defined]


def main() -> None:
    torch.manual_seed(1)
    with mock.patch.object(packed_linear, "SPLIT_TILES", 1):
        for name, weight in weights(CUT, torch.float32).items():
            check(name, weight, torch.float32)
        for name in ("fp8, blocks", "int8", "int4, zeros", "mxfp4"):
            check(name, weights(WHOLE, torch.bfloat16)[name], torch.bfloat16)
    check_misfits()
    with tempfile.TemporaryDirectory(prefix="tandem-packed-") as folder:
        for name in STORED:
            check_checkpoint(Path(folder) / name, name)


if __name__ == "__main__":
    main()
