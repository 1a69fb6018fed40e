"""Qwen3.5 and Gemma 3 as they are published: the text part of a model that sees images, its experts in one tensor of each layer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model_files.drafter_config import nextn_of
from engine.model_files.model_config import load_model_config
from engine.models.load import load_model
from service.flags import ConfigError
from tests.models.reference_attend import Sequence
from tests.models.test_draft_models import load, of_the_engine
from tests.models.test_parity import random_ids
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint, write_json


def logits_of(path: str) -> torch.Tensor:
    model = load_model(path, load_model_config(path), dtype="float32", device="cpu", progress=False)
    return Sequence(model).extend(random_ids(20))


def published(folder: Path, **fields: Any) -> str:
    """A tiny Qwen3.5 MoE with a drafter beside it, and a tensor of a tower that its config.json does not describe."""
    path = make_tiny_checkpoint(folder, "qwen3_5_moe_text", **fields)
    config = json.loads((folder / "config.json").read_text())
    outside = {"tie_word_embeddings": config.pop("tie_word_embeddings")}
    write_json(
        folder / "config.json",
        {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config, **outside},
    )
    edit_tensors(folder / "model.safetensors", _publish)
    return path


def _publish(tensors: dict[str, torch.Tensor]) -> None:
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in list(tensors):
        if name.startswith("lm_head."):
            continue
        tensor, name = tensors.pop(name), name.replace("model.", "model.language_model.", 1)
        if found := re.match(r"(.*\.experts)\.\d+\.(gate|up|down)_proj", name):
            stacks.setdefault(f"{found[1]} {found[2]}", []).append(tensor)
        else:
            tensors[name] = tensor
    for place in {key.split()[0] for key in stacks}:
        gate, up, down = (torch.stack(stacks[f"{place} {kind}"]) for kind in ("gate", "up", "down"))
        tensors[f"{place}.gate_up_proj"], tensors[f"{place}.down_proj"] = torch.cat((gate, up), 1), down
    tensors.setdefault("mtp.fc.weight", torch.ones(8, 8))
    tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(8)


def test_a_published_checkpoint_has_the_logits_of_the_plain_one(tmp_path: Path) -> None:
    plain = make_tiny_checkpoint(tmp_path / "plain", "qwen3_5_moe_text")
    path = published(tmp_path / "published")
    assert load_model_config(path) == load_model_config(plain)
    assert torch.equal(logits_of(path), logits_of(plain))


def test_its_mtp_layer_drafts_as_the_plain_ones(tmp_path: Path) -> None:
    """Its experts lie in one tensor, too."""
    own = {"mtp_num_hidden_layers": 1}
    paths = (
        make_tiny_checkpoint(tmp_path / "plain", "qwen3_5_moe_text", **own),
        published(tmp_path / "published", **own),
    )
    plain, other = (of_the_engine(load(path, nextn_of(load_model_config(path), flag=""))) for path in paths)
    assert all(torch.equal(*pair) for pair in zip(plain, other, strict=True))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_gemma_3_is_its_text_model(prefix: str, tmp_path: Path) -> None:
    plain = make_tiny_checkpoint(tmp_path / "plain", "gemma3_text")
    path = make_tiny_checkpoint(tmp_path / "published", "gemma3_text")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    outside = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    write_json(tmp_path / "published" / "config.json", {**outside, "text_config": config})

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"
        for name in list(tensors):
            tensors[head if name == "lm_head.weight" else name.replace("model.", prefix, 1)] = tensors.pop(name)
        tensors["vision_tower.blocks.0.weight"] = torch.ones(8)

    edit_tensors(tmp_path / "published" / "model.safetensors", rename)
    assert load_model_config(path) == load_model_config(plain)
    assert torch.equal(logits_of(path), logits_of(plain))


def test_a_model_that_sees_images_names_its_text_model(tmp_path: Path) -> None:
    path = published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, "text_config": None})
    with pytest.raises(ConfigError, match=r"config\.json: text_config: Qwen3_5MoeForConditionalGeneration needs"):
        load_model_config(path)
