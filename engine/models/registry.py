"""Which class runs which architecture, and how a model is loaded.

A new family: a class that implements `CausalLM`, a line here, and one in `engine.model_files.model_config.FAMILIES`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.model_files.model_config import ModelConfig
from engine.models.causal_lm import CausalLM
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import DenseDecoder
from service.flags import ConfigError

MODELS: dict[str, Callable[[ModelConfig, Checkpoint], CausalLM]] = {
    "LlamaForCausalLM": DenseDecoder,
    "MistralForCausalLM": DenseDecoder,
    "Qwen2ForCausalLM": DenseDecoder,
    "Qwen3ForCausalLM": DenseDecoder,
}


def load_model(
    model_path: str,
    config: ModelConfig,
    *,
    dtype: str,
    device: str,
    progress: bool,
    context_length: int | None = None,
) -> CausalLM:
    """The model of `model_path` with its weights in `dtype` ("bfloat16" | "float32" | "float16") on `device`.

    `context_length`: positions in use (the RoPE table of a million is half a GiB). Raises `ConfigError` for files that do
    not fit `config`.
    """
    build = MODELS.get(config.architecture)
    if build is None:
        raise ConfigError(f"--model-path {model_path}: no model class for {config.architecture}")
    with (
        torch.inference_mode(),
        Checkpoint(model_path, dtype=dtype, device=device, progress=progress) as checkpoint,
    ):
        positions = min(context_length or config.max_position_embeddings, config.max_position_embeddings)
        model = build(replace(config, max_position_embeddings=positions), checkpoint)
        checkpoint.check_all_taken()
    return model
