"""PEFT directories for the tiny checkpoints, and the same adapters merged by hand: W + scale * B A."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny_checkpoints import make_tiny_checkpoint, write_json

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_tiny_adapter(
    folder: Path,
    checkpoint: str,
    *,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    layers: tuple[int, ...] = (0, 1, 2, 3),
    ranks: dict[str, int] | None = None,
    **fields: Any,
) -> str:
    """Random A and B for `targets` of `layers`; `ranks`: other ranks by end of name; `fields` go to the config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets), "bias": "none"}
    write_json(folder / "adapter_config.json", config | {"use_dora": False, "modules_to_save": None} | fields)
    save_file(
        adapter_tensors(checkpoint, seed, rank, targets, layers, ranks or {}), folder / "adapter_model.safetensors"
    )
    return str(folder)


def adapter_tensors(
    checkpoint: str, seed: int, rank: int, targets: tuple[str, ...], layers: tuple[int, ...], ranks: dict[str, int]
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(Path(checkpoint) / "model.safetensors").items()):
        matrix = name.removesuffix(".weight")
        if matrix.rpartition(".")[2] not in targets or int(matrix.split(".")[2]) not in layers:
            continue
        r = next((r for end, r in ranks.items() if matrix.endswith(end)), rank)
        rows, columns = weight.shape
        tensors[f"base_model.model.{matrix}.lora_A.weight"] = torch.randn(r, columns, generator=generator) * 0.1
        tensors[f"base_model.model.{matrix}.lora_B.weight"] = torch.randn(rows, r, generator=generator) * 0.1
    return tensors


def merge(folder: Path, checkpoint: str, family: str, adapter: str, scales: dict[str, float]) -> str:
    """A checkpoint of `family` with the adapter's deltas in its weights; `scales` by end of name ("" is the rest)."""
    make_tiny_checkpoint(folder, family)
    weights = load_file(Path(checkpoint) / "model.safetensors")
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    for name in [n for n in tensors if ".lora_A." in n]:
        matrix = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        scale = next(s for end, s in scales.items() if matrix.endswith(end))
        weights[f"{matrix}.weight"] += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
