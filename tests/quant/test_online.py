"""`--quantization` of a bf16 checkpoint: near it; what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.device.machine import check_arithmetic
from engine.flags.resolve import resolve
from engine.kernels.linear import linear_kernel
from engine.model_files.model_config import load_model_config
from engine.models.load import load_model
from engine.quant.integers import HEAD, SCHEMES, quantized
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.reference_attend import Sequence
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "dtype": "bfloat16"}
PROMPT = prompt_of(70, 1)

needs_kernel = pytest.mark.skipif(linear_kernel() is None, reason="integers are multiplied by our kernel alone")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_is_rounded_to_the_nearest(scheme: str) -> None:
    weight = torch.randn(70, 150, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = quantized(weight, SCHEMES[scheme])
    steps = found.scales.repeat_interleave(found.group, 1)[:, :150]
    error = (quantized(weight.float(), SCHEMES[scheme]).dense() - weight.float()).abs()
    assert (error <= steps * 0.501).all()
    assert (quantized(torch.zeros(4, 64).bfloat16(), SCHEMES[scheme]).dense() == 0).all()


def logits(path: str, *, quantization: str | None = None) -> torch.Tensor:
    config = load_model_config(path)
    model = load_model(path, config, dtype="bfloat16", device="cpu", progress=False, quantization=quantization)
    return Sequence(model).extend(PROMPT)


@needs_kernel
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "phi3"])
@pytest.mark.parametrize("scheme", ["int8wo", "int4wo-32"])
def test_logits_are_those_of_the_rounded_weights(family: str, scheme: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, family, **SIZES)
    found, exact = logits(path, quantization=scheme), logits(path)

    def round_matrices(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("_proj.weight", "lm_head.weight")):
                of = HEAD if name.startswith("lm_head") else SCHEMES[scheme]
                tensors[name] = quantized(tensor, of).dense()

    edit_tensors(tmp_path / "model.safetensors", round_matrices)
    errors = (found - logits(path)).square().mean(1).sqrt() / exact.std(1)
    assert errors.median() < 0.05  # in some rows a router takes another expert
    assert (found - exact).std() > 0


@needs_kernel
def test_a_group_that_ranks_would_cut_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3", **SIZES)
    with pytest.raises(ConfigError, match=r"groups of 128 inputs do not divide a part of .*64 inputs in 2 parts"):
        EngineInProcess(path, quantization="int4wo-128", reduce_units=2)


def test_where_nothing_multiplies_integers_the_flag_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    config, model = EngineConfig(model_path=path, quantization="int8wo"), load_model_config(path)
    with pytest.raises(ConfigError, match=r"--quantization int8wo: .*not with float32"):
        resolve(replace(config, dtype="float32"), model, cuda=False)
    on_gpu = resolve(replace(config, device="cuda"), model, cuda=True)
    check_arithmetic(on_gpu)
    monkeypatch.setattr("engine.device.machine.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--quantization int8wo: needs Triton.* install triton"):
        check_arithmetic(on_gpu)
