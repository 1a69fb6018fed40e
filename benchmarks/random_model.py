"""A checkpoint with random bf16 weights in the shape of Qwen3-0.6B and a small vocabulary: for speed, not for sense.

Layers as Qwen3-0.6B's (hidden 1024, 28 layers, 16 query and 8 KV heads of 128, intermediate 3072): 0.88 GB are read per
decode step. The vocabulary and tokenizer are those of the model that ships with Tandem.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.models.tiny_checkpoints import tensor_shapes

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
STD = 0.02
SPECIAL_TOKENS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def write_model(
    folder: Path,
    *,
    layers: int = 28,
    hidden: int = 1024,
    intermediate: int | None = None,
) -> int:
    """Write the checkpoint; returns the bytes of its weights, all of which a decode step reads.

    `intermediate`: the width of an MLP; 3 * hidden by default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shipped = Path(DEFAULT_MODEL_PATH)
    for name in TOKENIZER_FILES:
        if (shipped / name).exists():
            shutil.copy(shipped / name, folder / name)
    vocab = int(json.loads((shipped / "config.json").read_text())["vocab_size"])
    heads = (HEADS, KV_HEADS, HEAD_DIM)
    wide = intermediate or 3 * hidden
    config = qwen3_config(layers=layers, hidden=hidden, intermediate=wide, vocab=vocab, heads=heads)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = _weights(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def qwen3_config(
    *, layers: int, hidden: int, intermediate: int, vocab: int, heads: tuple[int, int, int], context: int = 32768
) -> dict[str, object]:
    """config.json of a Qwen3. `heads`: query heads, KV heads, and the size of each."""
    num_heads, num_kv_heads, head_dim = heads
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": context,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _weights(config: dict[str, object]) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, shape in tensor_shapes(config).items():
        drawn = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * STD
        found[name] = drawn.to(torch.bfloat16)
    # greedy decoding never draws one: every token has text, and no answer ends early
    found["model.embed_tokens.weight"][:SPECIAL_TOKENS] = 0
    return found
