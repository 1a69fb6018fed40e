"""The float64 oracle tells rounding from a difference: transformers' own fp32 passes, weights that are off by little do not."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.float64_oracle import Float64Oracle
from tests.models.test_parity import random_ids, their_logits
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint

IDS = random_ids(72)


def in_fp32(path: str) -> torch.Tensor:
    return their_logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), IDS)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_next"])
def test_fp32_of_transformers_passes_and_a_norm_that_is_off_by_3e_4_does_not(family: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, family)
    exact = Float64Oracle(path).logits(IDS)
    exact.check(in_fp32(path))
    name = "model.layers.1.input_layernorm.weight"
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors[name].mul_(1 + 3e-4))
    with pytest.raises(AssertionError, match="times what rounding explains"):
        exact.check(in_fp32(path))


def test_nothing_of_the_answer_is_fp32(tmp_path: Path) -> None:
    """A change of 1e-12 reaches the logits, and their bound is that of fp32."""
    path = make_tiny_checkpoint(tmp_path, "qwen3_next")
    before, oracle = Float64Oracle(path).logits(IDS), Float64Oracle(path)
    with torch.no_grad():
        oracle._model.model.layers[0].input_layernorm.weight.add_(1e-12)
    change = (oracle.logits(IDS).value - before.value).abs().amax(-1)
    assert 0 < change.median() < 1e-10
    assert 1e-6 < before.bound().median() < 1e-3
