"""SmolLM2 as a folder of safetensors in bfloat16: what every engine reads, and computes with the same weights.

usage: python -m benchmarks.float_checkpoint DIR
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.gguf.config import config_fields
from engine.gguf.file import open_gguf
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.model_files.source import smollm2_file
from engine.models.checkpoint import Checkpoint
from engine.text.tokenizer import load_tokenizer


def write_smollm2(folder: Path) -> None:
    """Raises `ConfigError` where its package is not installed."""
    path = smollm2_file()
    folder.mkdir(parents=True, exist_ok=True)
    fields = config_fields(open_gguf(path))
    theta = fields["rope_parameters"]["rope_theta"]
    old_names = {"rope_theta": theta, "torch_dtype": "bfloat16", "hidden_act": "silu"}  # of transformers 4
    (folder / "config.json").write_text(json.dumps({**fields, **old_names}, indent=1))
    tokenizer = load_tokenizer(path)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer.config, **kind}))
    with torch.inference_mode(), Checkpoint(str(path), dtype="float32", device="cpu", progress=False) as checkpoint:
        shapes = shapes_of(load_model_config(str(path)))
        weights = {name: checkpoint.take(name, shape).bfloat16() for name, shape in shapes.items()}
        checkpoint.check_all_taken()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shapes_of(config: ModelConfig) -> dict[str, list[int]]:
    """Of the tensors of a Llama whose head is its embedding."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    of_layer = {
        "self_attn.q_proj": [query, hidden],
        "self_attn.k_proj": [key, hidden],
        "self_attn.v_proj": [key, hidden],
        "self_attn.o_proj": [hidden, query],
        "mlp.gate_proj": [wide, hidden],
        "mlp.up_proj": [wide, hidden],
        "mlp.down_proj": [hidden, wide],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    layers = range(config.num_layers)
    found = {f"model.layers.{layer}.{name}.weight": shape for layer in layers for name, shape in of_layer.items()}
    return {"model.embed_tokens.weight": [config.vocab_size, hidden], "model.norm.weight": [hidden], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write_smollm2(parser.parse_args().folder)


if __name__ == "__main__":
    main()
