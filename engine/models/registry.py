"""Which class runs which architecture, and the one way to get a loaded model.

A new family: a class that implements `CausalLM`, a line here, and a line in `engine.model_config.FAMILIES`.
"""

from collections.abc import Callable

import torch

from engine.config import ConfigError
from engine.model_config import ModelConfig
from engine.models.causal_lm import CausalLM
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import DenseDecoder

MODELS: dict[str, Callable[[ModelConfig, Checkpoint], CausalLM]] = {
    "LlamaForCausalLM": DenseDecoder,
    "MistralForCausalLM": DenseDecoder,
    "Qwen2ForCausalLM": DenseDecoder,
    "Qwen3ForCausalLM": DenseDecoder,
}


def load_model(model_path: str, config: ModelConfig, *, dtype: str, device: str, progress: bool) -> CausalLM:
    """The model of `model_path` with its weights in `dtype` ("bfloat16" | "float32" | "float16") on `device`.

    `progress`: show a bar (only on a terminal). Raises `ConfigError` for files that do not fit `config`.
    """
    build = MODELS.get(config.architecture)
    if build is None:
        raise ConfigError(f"--model-path {model_path}: no model class for {config.architecture}")
    with (
        torch.inference_mode(),
        Checkpoint(model_path, dtype=dtype, device=device, progress=progress) as checkpoint,
    ):
        model = build(config, checkpoint)
        checkpoint.check_all_taken()
    return model
