"""Experts of every layout under `--quantization`, and of MXFP4: packed integers whose answers are those of their values."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.linear import linear_kernel
from engine.model_files.model_config import load_model_config
from engine.models.expert_mlp import ExpertMLP
from engine.models.layer_kinds import mixtures_in
from engine.models.load import load_model
from engine.quant.integers import SCHEMES, quantized
from service.flags import ConfigError
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint
from tests.quant.test_mxfp4 import with_blocks

HIDDEN = 128
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 192, "dtype": "bfloat16"}
CASES = [
    ("qwen3_moe", "int8wo"),
    ("mixtral", "int4wo-32"),
    ("glm4_moe", "int8wo"),
    ("gpt_oss", "int8wo"),
    ("gpt_oss", "int4wo-32"),
]
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="integers are multiplied by our kernel alone")


def mixture(path: str, **flags: Any) -> ExpertMLP:
    """The first layer's that has one."""
    model = load_model(path, load_model_config(path), dtype="bfloat16", device="cpu", progress=False, **flags)
    found = next(mixture for layer in model._layers for mixture in mixtures_in(layer))
    assert isinstance(found, ExpertMLP)
    return found


def kinds_of(mixture: ExpertMLP) -> set[tuple[int, bool]]:
    """Bits of the experts' matrices, 0 of floats, and whether they are floats of 4 bits."""
    experts = mixture._experts
    parts = [experts._gate_up, *experts._downs]
    return {(part._weight.bits, part._weight.e2m1) for part in parts}  # type: ignore[attr-defined]


@torch.inference_mode()
def answers(mixture: ExpertMLP, rows: int) -> torch.Tensor:
    return mixture._partial(torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16())


def assert_near(path: str, twin: str, **flags: Any) -> None:
    packed, floats = mixture(path, **flags), mixture(twin)
    for rows in (1, 5, 150):
        found, expected = answers(packed, rows), answers(floats, rows)
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def round_experts(tensors: Tensors, scheme: str) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() == 3:  # all experts, inputs before outputs
            tensors[name] = torch.stack([quantized(one.t(), SCHEMES[scheme]).dense().t() for one in tensor])
        elif "experts" in name and tensor.dim() == 2 and not name.endswith("_bias"):
            tensors[name] = quantized(tensor, SCHEMES[scheme]).dense()


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_experts_are_rounded_and_stay_packed(family: str, scheme: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "floats", family, **SIZES)
    twin = make_tiny_checkpoint(tmp_path / "rounded", family, **SIZES)
    edit_tensors(tmp_path / "rounded" / "model.safetensors", lambda tensors: round_experts(tensors, scheme))
    assert kinds_of(mixture(path, quantization=scheme)) == {(SCHEMES[scheme].bits, False)}
    assert_near(path, twin, quantization=scheme)


def test_floats_of_4_bits_stay_what_they_are(tmp_path: Path) -> None:
    """Under `--quantization`, too, which is for floats."""
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    path = make_tiny_checkpoint(tmp_path / "blocks", "gpt_oss", **SIZES, **stored)
    twin = make_tiny_checkpoint(tmp_path / "values", "gpt_oss", **SIZES)
    values: Tensors = {}
    random = torch.Generator().manual_seed(1)
    edit_tensors(tmp_path / "blocks" / "model.safetensors", lambda tensors: values.update(with_blocks(tensors, random)))
    edit_tensors(tmp_path / "values" / "model.safetensors", lambda tensors: tensors.update(values))
    assert kinds_of(mixture(path)) == kinds_of(mixture(path, quantization="int8wo")) == {(4, True)}
    assert_near(path, twin)


def test_a_group_that_segments_would_cut_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "gpt_oss", **SIZES, head_dim=64)
    said = r"groups of 128 inputs do not divide a part of .*experts\.down_proj, 192 inputs in 2 parts"
    with pytest.raises(ConfigError, match=said):
        mixture(path, quantization="int4wo-128", reduce_units=2)
