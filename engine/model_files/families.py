"""Properties of architectures that config.json lacks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.model_files.experts_config import (
    GPT_OSS_NAMES,
    GRANITE_NAMES,
    MINIMAX_NAMES,
    MIXTRAL_NAMES,
    PLAIN_NAMES,
    QWEN_NAMES,
    QWEN_SHARED_NAMES,
    ExpertNames,
    ExpertsConfig,
    read_deepseek_v2,
    read_deepseek_v3,
    read_glm4,
    read_glm4_lite,
    read_glm_sparse,
    read_gpt_oss,
    read_granite_experts,
    read_minimax,
    read_mixtral,
    read_qwen3,
    read_qwen3_next,
)
from engine.model_files.fields import (
    Arithmetic,
    Fields,
    read_falcon,
    read_gemma,
    read_granite,
    read_olmo,
    read_phi,
    read_plain,
)
from engine.model_files.recurrent_config import (
    RecurrentConfig,
    read_delta,
    read_falcon_mamba,
    read_granite_mamba,
)


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Tensor names of a dense MLP. `place`: after a layer's prefix; `width`: a config field."""

    place: str = "mlp"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    width: str = "intermediate_size"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class NextnNames:
    """Tensor names of the MTP layer; "{}" is the model's number of layers.

    `join`: the matrix before the layer. `default`: such layers if config.json has none.
    """

    layer: str = "model.layers.{}."
    join: str = "model.layers.{}.eh_proj"
    embedding_norm: str = "model.layers.{}.enorm"
    hidden_norm: str = "model.layers.{}.hnorm"
    norm: str = "model.layers.{}.shared_head.norm"
    default: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFamily:
    """Properties of an architecture that rope_config.py reads.

    interleaved:    RoPE pairs are neighbours
    rotary_share:   default rotary share of a head
    gated_window:   `sliding_window` requires `use_sliding_window`
    window_period:  default period of full attention layers (0: none)
    context_is_scaled: max_position_embeddings includes RoPE scaling
    some_unturned:  some layers have no RoPE
    named_rope:     RoPE only if `position_embedding_type` is "rope"
    """

    interleaved: bool = False
    rotary_share: float = 1.0
    gated_window: bool = False
    default_window: int | None = None
    window_period: int = 0
    rope_of_kinds: bool = False
    context_is_scaled: bool = False
    some_unturned: bool = False
    named_rope: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(RopeFamily):
    """Properties of an architecture.

    qkv_bias:       of q, k, v (None for config `attention_bias`, else `default_bias`)
    out_bias:       o has a bias if q, k, v do
    qk_norm:        RMSNorm on q and k: "head" per head, "whole" over all heads, "" none
    qk_norm_flag:   config `use_qk_norm` turns "head" on
    norms:          "before", "after" or "around" attention and MLP, "both" (around, with Gemma's
                    names), "beside": one before both, which run in parallel
    eps:            config field of the norms' epsilon, and its default
    final_norm, out: tensor names of the last norm and of attention's output
    fused_qkv, fused_mlp: one matrix in the checkpoint for q, k, v; for gate, up
    arithmetic:     reads other differences to Llama
    defaults:       of config fields
    latent, indexed, index_pairs: MLA; with sparse attention; its RoPE pairs are neighbours
    attention_gate: q_proj has a gate after each head; its sigmoid multiplies attention
    mxfp4:          experts may be MXFP4 blocks
    """

    qkv_bias: bool | None = None
    default_bias: bool = False
    out_bias: bool = False
    qk_norm: str = ""
    qk_norm_flag: bool = False
    norms: str = "before"
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    final_norm: str = "norm"
    out: str = "o_proj"
    head_bias: bool = False
    fused_qkv: bool = False
    fused_mlp: bool = False
    mlp: MlpNames = MlpNames()
    arithmetic: Callable[[Fields], Arithmetic] = read_plain
    defaults: Mapping[str, Any] = field(default_factory=dict)
    experts: Callable[[Fields, int], ExpertsConfig | None] | None = None
    expert_names: ExpertNames = PLAIN_NAMES
    latent: bool = False
    indexed: bool = False
    index_pairs: bool = False
    recurrent: Callable[[Fields, int], RecurrentConfig] | None = None
    attention_gate: bool = False
    mxfp4: bool = False
    nextn: NextnNames = NextnNames()


_QWEN_HYBRID = Family(
    out_bias=True,
    qk_norm="head",
    rotary_share=0.25,
    recurrent=read_delta,
    attention_gate=True,
    arithmetic=partial(read_plain, norm_offset=1.0),
    nextn=NextnNames(
        layer="mtp.layers.0.",
        join="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
        default=1,  # Qwen3-Next's config lacks it; its tensors show it
    ),
)
_GEMMA2 = Family(
    norms="both",
    window_period=2,
    default_window=4096,
    arithmetic=read_gemma,
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm="head",
    window_period=6,
    rope_of_kinds=True,
    context_is_scaled=True,
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
)
_GLM = Family(default_bias=True, fused_mlp=True, interleaved=True, rotary_share=0.5)

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(interleaved=True, latent=True, experts=read_deepseek_v2),
    "DeepseekV32ForCausalLM": Family(interleaved=True, latent=True, indexed=True, experts=read_deepseek_v3),
    "DeepseekV3ForCausalLM": Family(interleaved=True, latent=True, experts=read_deepseek_v3),
    "FalconH1ForCausalLM": Family(
        qkv_bias=False,
        norms="before, Falcon",
        final_norm="final_layernorm",
        arithmetic=read_falcon,
        recurrent=read_falcon_mamba,
        mlp=MlpNames("feed_forward"),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "GemmaForCausalLM": Family(
        arithmetic=read_gemma,
        defaults={"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "Glm4MoeForCausalLM": Family(rotary_share=0.5, qk_norm_flag=True, experts=read_glm4),
    "Glm4MoeLiteForCausalLM": Family(interleaved=True, latent=True, experts=read_glm4_lite),
    "Glm4ForCausalLM": replace(_GLM, norms="around"),
    "GlmForCausalLM": _GLM,
    "GlmMoeDsaForCausalLM": Family(
        interleaved=True, latent=True, indexed=True, index_pairs=True, experts=read_glm_sparse
    ),
    "GptOssForCausalLM": Family(
        default_bias=True,
        out_bias=True,
        default_window=128,
        window_period=2,
        arithmetic=partial(read_plain, sinks=True),
        experts=read_gpt_oss,
        expert_names=GPT_OSS_NAMES,
        mxfp4=True,
        defaults={"head_dim": 64},
    ),
    "GraniteForCausalLM": Family(out_bias=True, arithmetic=read_granite),
    "GraniteMoeHybridForCausalLM": Family(
        out_bias=True,
        arithmetic=read_granite,
        recurrent=read_granite_mamba,
        experts=read_granite_experts,
        expert_names=GRANITE_NAMES,
        fused_mlp=True,
        named_rope=True,
        mlp=MlpNames("shared_mlp", "input_linear", "output_linear", "shared_intermediate_size"),
    ),
    "LlamaForCausalLM": Family(out_bias=True),
    "MiniMaxM2ForCausalLM": Family(
        qkv_bias=False,
        qk_norm="whole",
        experts=read_minimax,
        expert_names=MINIMAX_NAMES,
        defaults={"rope_theta": 5e6},
    ),
    "MistralForCausalLM": Family(qkv_bias=False, default_window=4096),
    "MixtralForCausalLM": Family(qkv_bias=False, experts=read_mixtral, expert_names=MIXTRAL_NAMES),
    "OlmoForCausalLM": Family(out_bias=True, eps=("layer_norm_eps", 1e-5), arithmetic=read_olmo),
    "Olmo2ForCausalLM": Family(out_bias=True, qk_norm="whole", norms="after"),
    "Olmo3ForCausalLM": Family(
        out_bias=True, qk_norm="whole", norms="after", default_window=4096, window_period=4, rope_of_kinds=True
    ),
    "Phi3ForCausalLM": Family(qkv_bias=False, fused_qkv=True, fused_mlp=True),
    "PhiForCausalLM": Family(
        qkv_bias=True,
        out_bias=True,
        norms="beside",
        eps=("layer_norm_eps", 1e-5),
        final_norm="final_layernorm",
        out="dense",
        head_bias=True,
        rotary_share=0.5,
        mlp=MlpNames("mlp", "fc1", "fc2", bias=True),
        arithmetic=read_phi,
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, gated_window=True),
    "Qwen3ForCausalLM": Family(out_bias=True, qk_norm="head", gated_window=True),
    "Qwen3MoeForCausalLM": Family(
        out_bias=True, qk_norm="head", gated_window=True, experts=read_qwen3, expert_names=QWEN_NAMES
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN_HYBRID,
        recurrent=partial(read_delta, by_key_head=True),
        experts=read_qwen3_next,
        expert_names=QWEN_SHARED_NAMES,
    ),
    "Qwen3_5ForCausalLM": _QWEN_HYBRID,
    "Qwen3_5MoeForCausalLM": replace(_QWEN_HYBRID, experts=read_qwen3_next, expert_names=QWEN_SHARED_NAMES),
    "SmolLM3ForCausalLM": Family(
        out_bias=True, gated_window=True, some_unturned=True, defaults={"tie_word_embeddings": True}
    ),
}
