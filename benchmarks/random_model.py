"""A checkpoint with random bf16 weights in the shape of Qwen3-0.6B and a small vocabulary: for speed, not for sense.

usage: python -m benchmarks.random_model DIR [--layers 28] [--hidden 1024] [--intermediate N] [--experts N --per-token N]

Layers as Qwen3-0.6B's (hidden 1024, 28 layers, 16 query and 8 KV heads of 128, intermediate 3072): 0.88 GB are read per
decode step. The vocabulary and tokenizer are those of the model that ships with Tandem.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from engine.model_files.model_config import DEFAULT_MODEL_PATH

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
STD = 0.02
SPECIAL_TOKENS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


class Experts(NamedTuple):
    """`count` experts in the place of each MLP, of which a token takes `per_token`."""

    count: int
    per_token: int


def write_model(
    folder: Path,
    *,
    layers: int = 28,
    hidden: int = 1024,
    intermediate: int | None = None,
    experts: Experts | None = None,
) -> int:
    """Write the checkpoint; returns the bytes of its weights, all of which a decode step of a model without experts reads."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = Path(DEFAULT_MODEL_PATH)
    for name in TOKENIZER_FILES:
        if (shipped / name).exists():
            shutil.copy(shipped / name, folder / name)
    vocab = int(json.loads((shipped / "config.json").read_text())["vocab_size"])
    wide = intermediate or 3 * hidden
    config = _config(vocab, layers=layers, hidden=hidden, wide=wide)
    if experts is not None:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": wide}
        config |= {"num_experts": experts.count, "num_experts_per_tok": experts.per_token, "norm_topk_prob": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = _weights(vocab, layers=layers, hidden=hidden, wide=wide, experts=experts)
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


def _weights(vocab: int, *, layers: int, hidden: int, wide: int, experts: Experts | None) -> dict[str, torch.Tensor]:
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
        places = ["mlp"]
        if experts is not None:
            places = [f"mlp.experts.{index}" for index in range(experts.count)]
            found[at + "mlp.gate.weight"] = matrix(experts.count, hidden)
        for place in places:
            found[f"{at}{place}.gate_proj.weight"] = matrix(wide, hidden)
            found[f"{at}{place}.up_proj.weight"] = matrix(wide, hidden)
            found[f"{at}{place}.down_proj.weight"] = matrix(hidden, wide)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, help="width of an MLP or of each expert (3 * hidden)")
    parser.add_argument("--experts", type=int, help="number of experts in the place of each MLP")
    parser.add_argument("--per-token", type=int, default=2, help="experts that a token takes")
    args = parser.parse_args()
    experts = Experts(args.experts, args.per_token) if args.experts else None
    num_bytes = write_model(
        args.folder, layers=args.layers, hidden=args.hidden, intermediate=args.intermediate, experts=experts
    )
    print(f"{num_bytes / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
