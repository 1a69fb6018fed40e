"""Tiny checkpoints of classifiers, and of embedding models as sentence-transformers saves them: without a head of tokens."""

from pathlib import Path
from typing import Any

import torch

from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint, write_json


def make_classifier(folder: Path, family: str, *, labels: tuple[str, ...], **overrides: Any) -> str:
    """`labels`: their names, in order."""
    name = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    path = make_tiny_checkpoint(
        folder,
        family,
        architectures=[f"{name}ForSequenceClassification"],
        id2label={str(i): label for i, label in enumerate(labels)},
        **overrides,
    )

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors.pop("lm_head.weight")
        tensors["score.weight"] = head[40 : 40 + len(labels)].clone()

    edit_tensors(folder / "model.safetensors", edit)
    return path


def make_embedding_model(
    folder: Path, *, bare: bool, pooling: str = "lasttoken", unit: bool = True, **overrides: Any
) -> str:
    """`bare`: its class is Qwen3Model and names in the file leave out "model."; else sentence-transformers' modules.json tells.

    `pooling`: as sentence-transformers calls it. `unit`: it has Normalize behind that.
    """
    architecture = "Qwen3Model" if bare else "Qwen3ForCausalLM"
    path = make_tiny_checkpoint(folder, "qwen3", architectures=[architecture], **overrides)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        for name in list(tensors) if bare else ():
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(folder / "model.safetensors", edit)
    if not bare:
        last = {"2_Normalize": "Normalize"} if unit else {}
        write_modules(folder, {"": "Transformer", "1_Pooling": "Pooling", **last})
        modes = {f"pooling_mode_{name}": name.startswith(pooling) for name in ("cls_token", "mean_tokens", "lasttoken")}
        write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **modes})
    return path


def write_modules(folder: Path, modules: dict[str, str]) -> None:
    """modules.json of `modules`, each in a folder of its own."""
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules.items()]
    write_json(folder / "modules.json", listed)
    for path in modules:
        (folder / path).mkdir(exist_ok=True)
