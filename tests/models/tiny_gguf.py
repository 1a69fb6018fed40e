"""Tiny GGUF files, and beside each a checkpoint with exactly the values that its tensors stand for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from tests.models.files.gguf_file import Edit, write_gguf
from tests.models.tiny_checkpoints import make_tiny_checkpoint

# 256 elements are one block of the k-quants.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


def make_tiny_gguf(
    folder: Path,
    family: str,
    kind: str = "F32",
    *,
    edit: Edit | None = None,
    seed: int = 0,
    kinds: Mapping[str, Kind] | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Return model.gguf with matrices of type `kind`, and the checkpoint that says the same."""
    checkpoint, path = folder / "checkpoint", folder / "model.gguf"
    make_tiny_checkpoint(checkpoint, family, seed=seed, **SIZES | overrides)
    written = write_gguf(checkpoint, path, kind, edit=edit, seed=seed, kinds=kinds)
    save_file(written, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return path, checkpoint
