"""Random EAGLE and EAGLE-3 checkpoints for the tiny models (tests/models/tiny_checkpoints.py)."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.models.tiny_checkpoints import VOCAB_SIZE, write_json, write_tensors

HIDDEN, HEADS, KV_HEADS, DIM, SIZE = 64, 4, 2, 16, 96
INSIDE = (0, 2)  # layers whose outputs EAGLE-3 reads
HEAD_ROWS = 100  # every second token
Shapes = dict[str, list[int]]


def make_tiny_eagle(folder: Path, kind: str, *, dtype: str = "float32", **fields: Any) -> str:
    """`kind`: EAGLE or EAGLE3. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    shapes = _eagle() if kind == "EAGLE" else _eagle3()
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(getattr(torch, dtype))
        for name, shape in shapes.items()
    }
    if kind == "EAGLE3":
        tensors["d2t"] = torch.arange(HEAD_ROWS)
        tensors["t2d"] = torch.arange(VOCAB_SIZE) % 2 == 0
    write_tensors(folder, tensors)
    write_json(folder / "config.json", {**_config(kind, dtype), **fields})
    return str(folder)


def make_eagle_of(model: str, folder: Path) -> str:
    """A random EAGLE checkpoint for the dense model at `model`, of its sizes and type. Return its path."""
    fields = json.loads((Path(model) / "config.json").read_text())
    hidden, heads, kv_heads = (fields[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim, size = fields["head_dim"], fields["intermediate_size"]
    layer = _layer("layers.0", inputs=hidden, hidden=hidden, wide=heads * dim, narrow=kv_heads * dim, size=size)
    shapes = {"fc.weight": [hidden, 2 * hidden], **layer}
    folder.mkdir(parents=True)
    dtype = getattr(torch, fields["torch_dtype"])
    write_tensors(
        folder, {name: (torch.randn(shape) * 0.02 + ("norm" in name)).to(dtype) for name, shape in shapes.items()}
    )
    own = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1}
    write_json(folder / "config.json", {**fields, **own})
    return str(folder)


def _config(kind: str, dtype: str) -> dict[str, Any]:
    own = {"draft_vocab_size": HEAD_ROWS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(INSIDE)}}
    return {
        "architectures": [f"LlamaForCausalLM{'Eagle' if kind == 'EAGLE' else 'Eagle3'}"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "torch_dtype": dtype,
        **(own if kind == "EAGLE3" else {}),
    }


def _layer(
    prefix: str,
    *,
    inputs: int,
    hidden: int = HIDDEN,
    wide: int = HEADS * DIM,
    narrow: int = KV_HEADS * DIM,
    size: int = SIZE,
) -> Shapes:
    return {
        f"{prefix}.self_attn.q_proj.weight": [wide, inputs],
        f"{prefix}.self_attn.k_proj.weight": [narrow, inputs],
        f"{prefix}.self_attn.v_proj.weight": [narrow, inputs],
        f"{prefix}.self_attn.o_proj.weight": [hidden, wide],
        f"{prefix}.post_attention_layernorm.weight": [hidden],
        f"{prefix}.mlp.gate_proj.weight": [size, hidden],
        f"{prefix}.mlp.up_proj.weight": [size, hidden],
        f"{prefix}.mlp.down_proj.weight": [hidden, size],
    }


def _eagle() -> Shapes:
    """With embeddings, as many have them: names begin otherwise then."""
    own = {"fc.weight": [HIDDEN, 2 * HIDDEN], "fc.bias": [HIDDEN], "embed_tokens.weight": [VOCAB_SIZE, HIDDEN]}
    return {**own, **_layer("layers.0", inputs=HIDDEN)}


def _eagle3() -> Shapes:
    return {
        "fc.weight": [HIDDEN, len(INSIDE) * HIDDEN],
        **_layer("midlayer", inputs=2 * HIDDEN),
        "midlayer.input_layernorm.weight": [HIDDEN],
        "midlayer.hidden_norm.weight": [HIDDEN],
        "norm.weight": [HIDDEN],
        "lm_head.weight": [HEAD_ROWS, HIDDEN],
    }
