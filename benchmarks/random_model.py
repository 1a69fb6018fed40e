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
    wide = intermediate or 3 * hidden
    config = _config(vocab, layers=layers, hidden=hidden, wide=wide)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = _weights(vocab, layers=layers, hidden=hidden, wide=wide)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def _config(vocab: int, *, layers: int, hidden: int, wide: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _weights(vocab: int, *, layers: int, hidden: int, wide: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * STD).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    embed = matrix(vocab, hidden)
    embed[:SPECIAL_TOKENS] = 0  # greedy decoding never draws one: every token has text, and no answer ends early
    found = {"model.embed_tokens.weight": embed, "model.norm.weight": ones(hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found[at + "input_layernorm.weight"] = ones(hidden)
        found[at + "post_attention_layernorm.weight"] = ones(hidden)
        found[at + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, hidden)
        found[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, hidden)
        found[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, hidden)
        found[at + "self_attn.o_proj.weight"] = matrix(hidden, HEADS * HEAD_DIM)
        found[at + "self_attn.q_norm.weight"] = ones(HEAD_DIM)
        found[at + "self_attn.k_norm.weight"] = ones(HEAD_DIM)
        found[at + "mlp.gate_proj.weight"] = matrix(wide, hidden)
        found[at + "mlp.up_proj.weight"] = matrix(wide, hidden)
        found[at + "mlp.down_proj.weight"] = matrix(hidden, wide)
    return found
