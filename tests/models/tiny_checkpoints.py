"""Tiny random checkpoints of each family, complete enough to start a server from. Needs no transformers.

Weights are drawn wide (std 0.2, facts of the house: the usual 0.02 leaves no margin between the best tokens), norms and
biases random too, so that a mixed-up tensor shows. The tokenizer is byte-level: ids 16..271 are the bytes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIALS = ("<pad>", "<bos>", "<eos>", *(f"<special_{i}>" for i in range(3, 16)))
VOCAB_SIZE = len(SPECIALS) + 256
EOS = 2

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "llama": "LlamaForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

_GEMMA_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
NORMS = {
    "gemma2": _GEMMA_NORMS,
    "gemma3_text": _GEMMA_NORMS,
    "glm4": ("input", "post_self_attn", "post_attention", "post_mlp"),
    "olmo": (),
    "olmo2": ("post_attention", "post_feedforward"),
    "olmo3": ("post_attention", "post_feedforward"),
}

GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}  # not tied: scaled embeddings repeat their token then
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
OWN: dict[str, dict[str, Any]] = {  # fields that a family has or means otherwise
    "falcon_h1": {
        "mamba_d_ssm": 128,
        **_MAMBA,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 0.9,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.5, 0.8, 1.1, 0.7, 1.3],
        "mlp_multipliers": [0.6, 0.9],
    },
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": {
        **GEMMA,
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **GEMMA,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "granite": _GRANITE,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "attention", "mamba"],
        **_MAMBA,
        "mamba_expand": 2,
        "shared_intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "position_embedding_type": "nope",
        **_GRANITE,
    },
    "mistral": {"sliding_window": None},
    "olmo": {"clip_qkv": 1.5},
    "olmo3": {"sliding_window": 12, "rope_theta": 5e5},
    "phi": {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-4},
    "phi3": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True},
}

LATENTS: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "num_key_value_heads": 4,
}

_SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK = {**LATENTS, "q_lora_rank": 48, **_SIGMOID_EXPERTS}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}
_QWEN_SPARSE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
_QWEN_HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 32,
}
HYBRIDS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
MIXTURES: dict[str, dict[str, Any]] = {  # fields of their own
    "deepseek_v2": {
        **LATENTS,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK | _INDEXER,
    "glm_moe_dsa": _DEEPSEEK | _INDEXER,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4_moe": {**_SIGMOID_EXPERTS, "use_qk_norm": True},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "swiglu_limit": 1.5,
        "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_5_moe_text": _QWEN_SPARSE | _QWEN_HYBRID,
    "qwen3_moe": _QWEN_SPARSE,
    "qwen3_next": _QWEN_SPARSE | _QWEN_HYBRID,
}

CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{ '<special_3>' + m['role'] + '\\n' + m['content'] + '<eos>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<special_3>assistant\\n' }}{%- endif -%}"
)


def make_tiny_checkpoint(
    folder: Path, family: str, *, seed: int = 0, shards: int = 1, dtype: str = "float32", **overrides: Any
) -> str:
    """Write a checkpoint of `family` (of ARCHITECTURES) into `folder`; returns its path.

    4 layers, hidden 64, 4 heads and 2 KV heads of 16, vocabulary 272, context 4096, fp32, one file. `overrides` are
    fields of config.json; `shards` > 1 spreads the tensors over that many files with an index.
    """
    config = tiny_config(family, dtype) | overrides
    assert config["vocab_size"] >= VOCAB_SIZE, "the byte-level tokenizer needs every id up to 271"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    write_tokenizer(folder)
    write_tensors(folder, make_tensors(config, seed=seed), shards=shards)
    return str(folder)


def make_tensors(config: dict[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator) * 0.2
        adds = config["model_type"] in (*HYBRIDS, "gemma", "gemma2", "gemma3_text") and "linear_attn" not in name
        # norms that add 1 themselves are around 0
        is_factor = "norm" in name and not adds and not name.endswith("layernorm.bias")
        tensors[name] = (noise + 1.0 if is_factor else noise).to(dtype)
    return tensors


def tensor_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, family, num_layers = config["hidden_size"], config["model_type"], config["num_hidden_layers"]
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], hidden]
    nextn_layers = config.get("num_nextn_predict_layers", 0) + config.get("mtp_num_hidden_layers", 0)
    for i in range(num_layers + nextn_layers):
        layer = _layer(config, i)
        if family in HYBRIDS and i >= num_layers:
            shapes |= _mtp(config, layer)
            continue
        if i >= num_layers:
            layer |= {f"{name}.weight": [hidden] for name in ("enorm", "hnorm", "shared_head.norm")}
            layer |= {"eh_proj.weight": [hidden, 2 * hidden]}
            layer |= dict.fromkeys(
                ("embed_tokens.weight", "shared_head.head.weight"), shapes["model.embed_tokens.weight"]
            )
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if family == "falcon_h1":
        shapes["model.final_layernorm.weight"] = shapes.pop("model.norm.weight")
    if family == "olmo":
        del shapes["model.norm.weight"]
    if family == "phi":
        del shapes["model.norm.weight"]
        shapes |= {f"model.final_layernorm.{name}": [hidden] for name in ("weight", "bias")}
        shapes["lm_head.bias"] = [config["vocab_size"]]
    return shapes


def _layer(config: dict[str, Any], index: int) -> dict[str, list[int]]:
    """Of one layer, of those behind the model's too, which predict the token after the next."""
    hidden, family, attention = config["hidden_size"], config["model_type"], _attention(config)
    layer = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    sparse = family in MIXTURES and index >= config.get("first_k_dense_replace", 0)
    layer |= _experts(config) if sparse else {f"mlp.{name}.weight": shape for name, shape in _mlp(config).items()}
    layer |= {f"{name}_layernorm.weight": [hidden] for name in NORMS.get(family, ("input", "post_attention"))}
    if family in ("qwen2", "glm", "glm4") or config.get("attention_bias"):
        biased = (
            tuple(attention)
            if family in ("llama", "qwen3", "smollm3", "granite", "gpt_oss", "olmo")
            else ("q_proj", "k_proj", "v_proj")
        )
        layer |= {f"self_attn.{name}.bias": attention[name][:1] for name in biased}
    layer |= _norms_of_heads(config)
    if family in HYBRIDS and index < config["num_hidden_layers"] and (index + 1) % config["full_attention_interval"]:
        layer = {name: shape for name, shape in layer.items() if not name.startswith("self_attn.")}
        layer |= _delta(config)
    if family == "phi":
        return _phi_layer(layer)
    if family == "falcon_h1":
        return _falcon_layer(config, layer)
    if family == "granitemoehybrid":
        return _granite_layer(config, index, layer)
    return layer


def _attention(config: dict[str, Any]) -> dict[str, list[int]]:
    """Matrices of one layer."""
    if "kv_lora_rank" in config:
        return _latent_attention(config)
    hidden, dim, family = config["hidden_size"], config.get("head_dim", 0), config["model_type"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    if family == "phi3":
        return {"qkv_proj": [q + 2 * kv, hidden], "o_proj": [hidden, q]}
    gated = 2 * q if family in HYBRIDS else q
    return {"q_proj": [gated, hidden], "k_proj": [kv, hidden], "v_proj": [kv, hidden], "o_proj": [hidden, q]}


def _mlp(config: dict[str, Any]) -> dict[str, list[int]]:
    """Matrices of one dense layer."""
    hidden, size = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] in ("phi3", "glm", "glm4"):
        return {"gate_up_proj": [2 * size, hidden], "down_proj": [hidden, size]}
    return {"gate_proj": [size, hidden], "up_proj": [size, hidden], "down_proj": [hidden, size]}


def _norms_of_heads(config: dict[str, Any]) -> dict[str, list[int]]:
    """Norms inside the attention of one layer."""
    family, dim, norms = config["model_type"], config.get("head_dim", 0), dict[str, list[int]]()
    if family in ("qwen3", "qwen3_moe", "glm4_moe", "gemma3_text", *HYBRIDS):
        norms |= {f"self_attn.{name}_norm.weight": [dim] for name in "qk"}
    if "kv_lora_rank" in config:
        norms["self_attn.kv_a_layernorm.weight"] = [config["kv_lora_rank"]]
        if "index_topk" in config:
            norms |= {f"self_attn.indexer.k_norm.{name}": [config["index_head_dim"]] for name in ("weight", "bias")}
        if config["q_lora_rank"]:
            norms["self_attn.q_a_layernorm.weight"] = [config["q_lora_rank"]]
    if family in ("olmo2", "olmo3", "minimax_m2"):
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        norms |= {"self_attn.q_norm.weight": [heads * dim], "self_attn.k_norm.weight": [kv_heads * dim]}
    return norms


def _mtp(config: dict[str, Any], layer: dict[str, list[int]]) -> dict[str, list[int]]:
    """What a hybrid predicts the token after the next with, by its whole names."""
    hidden = config["hidden_size"]
    norms = {f"mtp.{name}.weight": [hidden] for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return {
        **{f"mtp.layers.0.{name}": shape for name, shape in layer.items()},
        "mtp.fc.weight": [hidden, 2 * hidden],
        **norms,
    }


def _phi_layer(plain: dict[str, list[int]]) -> dict[str, list[int]]:
    names = {
        **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
        "self_attn.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "input_layernorm": "input_layernorm",
    }
    weights = {name: plain[f"{old}.weight"] for old, name in names.items()}
    return {
        f"{name}.{kind}": shape[: 2 if kind == "weight" else 1]
        for name, shape in weights.items()
        for kind in ("weight", "bias")
    }


def _falcon_layer(config: dict[str, Any], plain: dict[str, list[int]]) -> dict[str, list[int]]:
    names = {"mlp.": "feed_forward.", "post_attention_": "pre_ff_"}
    layer = {}
    for name, shape in plain.items():
        for before, after in names.items():
            name = name.replace(before, after)
        layer[name] = shape
    norm = {"mamba.norm.weight": [config["mamba_d_ssm"]]} if config["mamba_rms_norm"] else {}
    return layer | _mamba(config) | norm


def _granite_layer(config: dict[str, Any], index: int, plain: dict[str, list[int]]) -> dict[str, list[int]]:
    hidden, count, size = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    shared, recurrent = config["shared_intermediate_size"], config["layer_types"][index] == "mamba"
    left_out = ("mlp.", "self_attn.") if recurrent else ("mlp.",)
    layer = {name: shape for name, shape in plain.items() if not name.startswith(left_out)}
    layer |= {
        "shared_mlp.input_linear.weight": [2 * shared, hidden],
        "shared_mlp.output_linear.weight": [hidden, shared],
    }
    if count:
        layer |= {
            "block_sparse_moe.router.layer.weight": [count, hidden],
            "block_sparse_moe.input_linear.weight": [count, 2 * size, hidden],
            "block_sparse_moe.output_linear.weight": [count, hidden, size],
        }
    return layer | (_mamba(config) | {"mamba.norm.weight": [2 * hidden]} if recurrent else {})


def _mamba(config: dict[str, Any]) -> dict[str, list[int]]:
    """Of one layer, but its norm."""
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = heads * config["mamba_d_head"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    return {
        "mamba.in_proj.weight": [inner + channels + heads, hidden],
        "mamba.conv1d.weight": [channels, 1, config["mamba_d_conv"]],
        "mamba.conv1d.bias": [channels],
        "mamba.A_log": [heads],
        "mamba.dt_bias": [heads],
        "mamba.D": [heads],
        "mamba.out_proj.weight": [hidden, inner],
    }


def _latent_attention(config: dict[str, Any]) -> dict[str, list[int]]:
    """Matrices of one layer."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, turned, values = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = {"q_proj": [heads * (plain + turned), hidden]}
    if q_rank := config["q_lora_rank"]:
        queries = {"q_a_proj": [q_rank, hidden], "q_b_proj": [heads * (plain + turned), q_rank]}
    if "index_topk" in config:
        heads_of_index, dim = config["index_n_heads"], config["index_head_dim"]
        queries |= {"indexer.wq_b": [heads_of_index * dim, q_rank], "indexer.wk": [dim, hidden]}
        queries["indexer.weights_proj"] = [heads_of_index, hidden]
    down = {"kv_a_proj_with_mqa": [rank + turned, hidden], "kv_b_proj": [heads * (plain + values), rank]}
    return {**queries, **down, "o_proj": [hidden, heads * values]}


def _delta(config: dict[str, Any]) -> dict[str, list[int]]:
    """Of one layer of Gated DeltaNet."""
    hidden, heads, value_dim = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * value_dim
    rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    if config["model_type"] != "qwen3_next":
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    shapes = {f"linear_attn.in_proj_{name}.weight": [count, hidden] for name, count in rows.items()}
    return shapes | {
        "linear_attn.conv1d.weight": [2 * keys + values, 1, config["linear_conv_kernel_dim"]],
        "linear_attn.A_log": [heads],
        "linear_attn.dt_bias": [heads],
        "linear_attn.norm.weight": [value_dim],
        "linear_attn.out_proj.weight": [hidden, values],
    }


def _experts(config: dict[str, Any]) -> dict[str, list[int]]:
    """Of one layer."""
    if config["model_type"] == "gpt_oss":
        return _fused_experts(config)
    hidden, family = config["hidden_size"], config["model_type"]
    size = config.get("moe_intermediate_size", config["intermediate_size"])
    count = config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"]
    place, gate, up, down = ("mlp", "gate_proj", "up_proj", "down_proj")
    if family in ("mixtral", "minimax_m2"):
        place, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2")
    shapes = {f"{place}.gate.weight": [count, hidden]}
    parts = [f"{place}.experts.{i}" for i in range(count)]
    if family in ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3", "deepseek_v32"):
        shapes["mlp.gate.e_score_correction_bias"] = [count]
    if family == "minimax_m2":
        shapes["block_sparse_moe.e_score_correction_bias"] = [count]
    sizes = dict.fromkeys(parts, size)
    if family in HYBRIDS:
        shapes["mlp.shared_expert_gate.weight"] = [1, hidden]
        sizes["mlp.shared_expert"] = config["shared_expert_intermediate_size"]
    if "n_shared_experts" in config:
        sizes["mlp.shared_experts"] = size * config["n_shared_experts"]
    for part, width in sizes.items():
        shapes |= {f"{part}.{gate}.weight": [width, hidden], f"{part}.{up}.weight": [width, hidden]}
        shapes[f"{part}.{down}.weight"] = [hidden, width]
    return shapes


def _fused_experts(config: dict[str, Any]) -> dict[str, list[int]]:
    count, hidden, size = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    return {
        "self_attn.sinks": [config["num_attention_heads"]],
        "mlp.router.weight": [count, hidden],
        "mlp.router.bias": [count],
        "mlp.experts.gate_up_proj": [count, hidden, 2 * size],
        "mlp.experts.gate_up_proj_bias": [count, 2 * size],
        "mlp.experts.down_proj": [count, size, hidden],
        "mlp.experts.down_proj_bias": [count, hidden],
    }


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def edit_tensors(file: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def tiny_config(family: str, dtype: str = "float32") -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    config |= MIXTURES.get(family, _QWEN_HYBRID if family in HYBRIDS else {}) | OWN.get(family, {})
    if "kv_lora_rank" in config:
        del config["head_dim"]
    return config


def write_tokenizer(folder: Path) -> None:
    alphabet = sorted(ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
