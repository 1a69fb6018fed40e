"""docs/models.md says which weights stay packed, on a CPU and on a GPU: what a checkpoint gives, and the kernels take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.integer_layout import fits
from engine.kernels.linear import linear_kernel
from engine.kernels.triton.packed import weight_fits
from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import Checkpoint
from engine.quant.integers import SCHEMES, Integers, quantized
from tests.models.tiny_gguf import make_tiny_gguf
from tests.packages import ROOT
from tests.quant.packed_weights import mxfp4
from tests.quant.stored_formats import FORMATS, make_both

WEIGHTS = {
    "fp8 (e4m3), with a scale for blocks, outputs or all": ["fp8-blocks", "fp8-one-scale"],
    "AWQ": ["awq"],
    "GPTQ of 4 or 8 bits": ["gptq", "gptq-8", "gptq-v2"],
    "GPTQ with `desc_act`": ["gptq-by-activation"],
    "compressed-tensors, `int-` or `pack-quantized`": [
        "packed-4",
        "packed-4-zeros",
        "packed-8",
        "int8",
        "int8-one-scale",
    ],
    "compressed-tensors, `float-quantized`": ["float8"],
    "MXFP4 (gpt-oss)": ["MXFP4"],
    "GGUF: Q4_0, Q4_1, Q4_K, Q5_K, Q8_0": ["Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q8_0"],
    "GGUF: Q6_K": ["Q6_K"],
    "`--quantization`": list(SCHEMES),
}


@pytest.mark.skipif(linear_kernel() is None, reason="without our kernel a CPU has floats")
def test_the_table_says_what_stays_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/models.md").read_text()
    assert set(FORMATS) <= {name for names in WEIGHTS.values() for name in names}
    for row, names in WEIGHTS.items():
        cells = {cells_of(tmp_path / name, name, monkeypatch) for name in names}
        assert len(cells) == 1, (row, cells)
        assert "| {} | {} | {} |".format(row, *cells.pop()) in page, row


def cells_of(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """On a CPU, and on a GPU."""
    take = taker(folder, name)
    on_cpu = take()
    with monkeypatch.context() as patch:
        patch.setattr("engine.models.quantized_tensors.takes_triton", lambda _: True)
        on_gpu = take()
    of_cpu = on_cpu is not None and fits(on_cpu, segments=1)
    return ("packed" if of_cpu else "bf16"), ("packed" if on_gpu is not None and weight_fits(on_gpu) else "bf16")


def taker(folder: Path, name: str) -> Callable[[], Integers | None]:
    if name in SCHEMES:
        return lambda: quantized(torch.randn(64, 256), SCHEMES[name])
    if name == "MXFP4":
        return lambda: mxfp4((64, 256), torch.bfloat16)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    if name in FORMATS:
        path = make_both(folder, name, "qwen3", **sizes)[0]
        kind = load_model_config(path).stored
    else:
        path, kind = str(make_tiny_gguf(folder, "llama", name, **sizes)[0]), None

    def take() -> Integers | None:
        with Checkpoint(path, dtype="bfloat16", device="cpu", progress=False, stored=kind) as checkpoint:
            return checkpoint.take_integers(["model.layers.0.mlp.down_proj.weight"], [256], 256)

    return take
