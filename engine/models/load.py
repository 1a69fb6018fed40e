"""How a model is loaded. One class runs all families of `engine.model_files.model_config.FAMILIES`."""

from dataclasses import replace

import torch

from engine.model_files.model_config import ModelConfig
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import DenseDecoder


def load_model(
    model_path: str, config: ModelConfig, *, dtype: str, device: str, progress: bool, context_length: int | None = None
) -> DenseDecoder:
    """The model of `model_path` with its weights in `dtype` ("bfloat16" | "float32" | "float16") on `device`.

    `context_length`: positions in use (the RoPE table of a million is half a GiB). Raises `ConfigError` for files that do
    not fit `config`.
    """
    with torch.inference_mode(), Checkpoint(model_path, dtype=dtype, device=device, progress=progress) as checkpoint:
        positions = min(context_length or config.max_position_embeddings, config.max_position_embeddings)
        model = DenseDecoder(replace(config, max_position_embeddings=positions), checkpoint)
        checkpoint.check_all_taken()
    return model
