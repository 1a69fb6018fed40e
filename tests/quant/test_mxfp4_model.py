"""gpt-oss with experts of MXFP4 blocks: the tokens of its twin with the same values in bf16, on ranks that cut a block too."""

from pathlib import Path

import pytest
import torch

from engine.model_files.model_config import load_model_config
from engine.quant.integers import BLOCK, mxfp4_values
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
