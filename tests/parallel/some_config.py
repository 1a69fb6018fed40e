"""A model's configuration from the sizes that matter to its ranks."""

from dataclasses import replace
from typing import Any

from engine.model_files.fields import Arithmetic
from engine.model_files.head_config import HeadConfig
from engine.model_files.model_config import ModelConfig
from engine.model_files.rope_config import RopeConfig

_PLAIN = ModelConfig(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=272,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0, dim=16),
    layer_ropes=(),
    tie_word_embeddings=False,
    attention_bias=False,
    attention_out_bias=False,
    qk_norm="head",
    norms="before",
    fused_qkv=False,
    fused_mlp=False,
    arithmetic=Arithmetic(),
    head=HeadConfig(),
    experts=None,
    latent=None,
    max_position_embeddings=4096,
    windows=(),
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)


def some_config(**sizes: Any) -> ModelConfig:
    """8 heads and 4 KV heads of 16, hidden 64, intermediate 96, 4 layers, vocabulary 272, where `sizes` say nothing else."""
    return replace(_PLAIN, **sizes)
