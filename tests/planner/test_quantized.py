"""`tandem plan` counts the bytes of a quantized model that an engine holds: packed on CPUs, floats on GPUs."""

from pathlib import Path
from typing import Any

import pytest

from engine.kernels.linear import PackedMatrix, linear_kernel
from engine.model_files.model_config import load_model_config
from engine.models.load import load_model
from planner.step_time import shape_of
from tests.quant.stored_formats import make_both

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "name", ["awq", "gptq", "gptq-by-activation", "packed-4", "packed-4-zeros", "int8", "fp8-blocks"]
)
def test_a_plan_counts_what_an_engine_holds(name: str, tmp_path: Path) -> None:
    paths = make_both(tmp_path, name, "qwen3", **SIZES)
    stored, twin = map(load_model_config, paths)
    assert shape_of(stored) == shape_of(twin), "on a GPU"
    planned, floats = shape_of(stored, on_cpu=True), shape_of(twin, on_cpu=True)
    head = 2 * floats.head_params
    assert planned.weight_bytes == planned.read_bytes == head + layer_bytes(paths[0])
    assert floats.weight_bytes == floats.read_bytes == head + layer_bytes(paths[1])
    assert shape_of(stored, 2, on_cpu=True).layer_params == floats.layer_params // 2


def layer_bytes(path: str) -> int:
    """Of the matrices of an engine's layers on this CPU."""
    if linear_kernel() is None:
        pytest.skip("integers are multiplied by our kernel alone")
    model = load_model(path, load_model_config(path), dtype="bfloat16", device="cpu", progress=False)
    matrices = [site.linear._matrix for site in model.linear_sites()]  # type: ignore[attr-defined]
    assert all(isinstance(matrix, PackedMatrix) for matrix in matrices)
    return sum(matrix._weight.weight.numel() for matrix in matrices)
