"""MXFP4: the values of transformers, and gpt-oss with the tokens of its twin in bf16, on ranks that cut a block too."""

from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.model_files.model_config import load_model_config
from engine.quant.integers import BLOCK, mxfp4_codes, mxfp4_values
from service.flags import ConfigError
from tests.engine.test_families import tokens_of
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint

HALF_BLOCKS = 96  # of which a rank of two has one block and a half


def with_blocks(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Put random blocks for the experts' matrices; return the same model with their values."""
    twin = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // BLOCK, BLOCK // 2), generator=generator).byte()
        scales = torch.randint(123, 126, blocks.shape[:-1], generator=generator).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        twin[name] = mxfp4_values(blocks, scales, dtype=torch.bfloat16).mT.contiguous()
    return twin


def test_blocks_give_the_tokens_of_their_values(tmp_path: Path) -> None:
    quantization = {"quant_method": "mxfp4"}
    sizes = {"dtype": "bfloat16", "intermediate_size": HALF_BLOCKS, "num_hidden_layers": 2}
    blocks = make_tiny_checkpoint(tmp_path / "blocks", "gpt_oss", **sizes, quantization_config=quantization)
    values = make_tiny_checkpoint(tmp_path / "values", "gpt_oss", **sizes)
    twins = {}
    edit_tensors(
        tmp_path / "blocks" / "model.safetensors",
        lambda tensors: twins.update(with_blocks(tensors, torch.Generator().manual_seed(1))),
    )
    edit_tensors(tmp_path / "values" / "model.safetensors", lambda tensors: tensors.update(twins))
    flags = {"dtype": "bfloat16", "num_threads": 1}
    wanted = tokens_of(values, **flags)
    assert tokens_of(blocks, **flags) == wanted
    flags["reduce_units"] = 2
    assert tokens_of(blocks, tp_size=2, **flags) == tokens_of(blocks, **flags)


def test_other_formats_and_families_are_refused(tmp_path: Path) -> None:
    for family, method in (("gpt_oss", "bitsandbytes"), ("llama", "mxfp4")):
        path = make_tiny_checkpoint(tmp_path / family, family, quantization_config={"quant_method": method})
        with pytest.raises(ConfigError, match="quantization_config: "):
            load_model_config(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_nibble_and_scale_has_transformers_value(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 5, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 5), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(mxfp4_values(blocks, scales, dtype=dtype), expected)
    assert all(
        torch.equal(mxfp4_codes(*one, dtype=dtype).dense(), own)
        for *one, own in zip(blocks, scales, expected, strict=True)
    )


def test_ends_of_the_scales_and_the_first_nibble() -> None:
    blocks = torch.full((3, 16), 0x21, dtype=torch.uint8)  # 0.5 and then 1.0
    values = mxfp4_values(blocks, torch.tensor([0, 254, 255], dtype=torch.uint8), dtype=torch.float32).view(3, 32)
    assert values[0, :2].tolist() == [2.0**-128, 2.0**-127]
    assert values[1, :2].tolist() == [2.0**126, 2.0**127]
    assert values[2].isnan().all()
