"""config.json: both spellings, defaults of the families, one clear line for whatever cannot be honoured."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.layers.rope import inverse_frequencies
from engine.model_files.head_config import HeadConfig
from engine.model_files.model_config import DEFAULT_MODEL_PATH, ModelConfig, load_model_config
from engine.model_files.rope_config import LinearScaling, Llama3Scaling, RopeConfig
from service.flags import ConfigError
from tests.models.headless import make_embedding_model
from tests.models.tiny_checkpoints import EOS, make_tiny_checkpoint, write_json
from tests.parallel.some_config import some_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"original_max_position_embeddings": 512}


def edited(folder: Path, family: str = "llama", **changes: Any) -> ModelConfig:
    """The config of a tiny checkpoint with `changes`; None removes a field."""
    path = make_tiny_checkpoint(folder, family)
    config = json.loads((folder / "config.json").read_text()) | changes
    write_json(folder / "config.json", {name: value for name, value in config.items() if value is not None})
    return load_model_config(path)


def test_every_field_is_read(tmp_path: Path) -> None:
    config = edited(tmp_path, "qwen3", rope_theta=1e6, rms_norm_eps=1e-5, torch_dtype="bfloat16")
    rope = RopeConfig(theta=1e6, dim=16)
    assert config == some_config(intermediate_size=128, num_heads=4, num_kv_heads=2, rms_norm_eps=1e-5, rope=rope)


def test_what_transformers_writes_reads_as_what_it_was_made_from(tmp_path: Path) -> None:
    before = edited(tmp_path / "old", rope_scaling={**LLAMA3, "original_max_position_embeddings": 512})
    AutoConfig.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in new and "rope_scaling" not in new, "this transformers writes the old names"
    assert load_model_config(str(tmp_path / "new")) == before
    assert before.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 512)


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "llama", eos_token_id=[7, 2])
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [9, 2]})
    assert load_model_config(str(tmp_path)).eos_token_ids == (2, 7, 9)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<special_5>"})
    assert load_model_config(str(tmp_path)).eos_token_ids == (2, 5, 7, 9)
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<special_6>"}})
    assert load_model_config(str(tmp_path)).eos_token_ids == (2, 6, 7, 9)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "a", "added_tokens_decoder": {}})
    letter = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    assert load_model_config(str(tmp_path)).eos_token_ids == (2, 7, 9, letter)
    for broken in ("{", json.dumps({"model": {"vocab": 3}})):
        (tmp_path / "tokenizer.json").write_text(broken)
        assert load_model_config(str(tmp_path)).eos_token_ids == (2, 7, 9), "its loading says what is broken"


def test_ends_of_both_parts_of_a_model_that_sees(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    seeing = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
    write_json(tmp_path / "config.json", {**seeing, "text_config": config, "image_token_index": 5, "eos_token_id": 9})
    assert load_model_config(str(tmp_path)).eos_token_ids == (EOS, 9)


@pytest.mark.parametrize(
    ("family", "scaling", "more", "context"),
    [
        ("llama", None, {}, 4096),
        ("llama", {"type": "yarn", "factor": 4.0}, {}, 16384),
        ("llama", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3072}, {}, 12288),
        ("llama", {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, {}, 4096),
        ("llama", {"type": "yarn", "original_max_position_embeddings": 1024}, {}, 4096),
        ("llama", {"type": "linear", "factor": 2.5}, {}, 10240),
        ("llama", {"type": "dynamic", "factor": 2.0}, {}, 8192),
        ("llama", {**LLAMA3, "original_max_position_embeddings": 512}, {}, 4096),
        ("phi3", {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}, LONGROPE, 4096),
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, {}, 4096),
        ("llama", None, {"model_max_length": 6000}, 6000),
        ("llama", {"type": "linear", "factor": 2.0}, {"model_max_length": 6000}, 12000),
    ],
)
def test_scaling_of_rope_lengthens_the_context(
    family: str, scaling: dict[str, Any] | None, more: dict[str, Any], context: int, tmp_path: Path
) -> None:
    """Factor times the original length, but where max_position_embeddings is with the scaling already."""
    assert edited(tmp_path, family, rope_scaling=scaling, **more).max_position_embeddings == context


def test_a_window_counts_in_a_longer_context(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    assert edited(tmp_path, "mistral", sliding_window=4096, rope_scaling=scaling).windows == (4096,) * 4


def test_dynamic_scaling_has_the_base_of_its_longest_context(tmp_path: Path) -> None:
    """As transformers computes it at that length."""
    config = edited(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    theirs = AutoConfig.from_pretrained(tmp_path)
    frequencies, factor = ROPE_INIT_FUNCTIONS["dynamic"](theirs, "cpu", seq_len=config.max_position_embeddings)
    assert inverse_frequencies(config.rope).tolist() == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert factor == 1.0 and config.rope.scaling is None


def test_families_fix_what_the_config_leaves_out(tmp_path: Path) -> None:
    qwen2 = edited(tmp_path / "a", "qwen2", head_dim=None, num_key_value_heads=None, sliding_window=64)
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.head_dim, qwen2.num_kv_heads) == (True, False, 16, 4)
    assert qwen2.windows == (), "Qwen's window counts only with use_sliding_window"
    llama = edited(tmp_path / "b", attention_bias=True, torch_dtype=None)
    assert (llama.attention_bias, llama.attention_out_bias, llama.dtype) == (True, True, "float32")
    assert edited(tmp_path / "c", "mistral", sliding_window=4096).windows == ()


def test_recurrent_layers_are_named_or_counted(tmp_path: Path) -> None:
    """The second of two stages has the layer with KV, number 0 of all such layers."""
    config = edited(tmp_path / "every", "qwen3_5_text", full_attention_interval=4)
    assert config.recurrent is not None and config.recurrent.layers == (0, 1, 2)
    assert (config.kv_layers(range(0, 2)), config.kv_layers(range(2, 4))) == (range(0), range(1))
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    config = edited(tmp_path / "named", "qwen3_5_text", layer_types=kinds)
    assert config.recurrent is not None and config.recurrent.layers == (1, 2)
    assert config.kv_layers(range(3, 4)) == range(1, 2)


def test_windows_are_those_of_their_layers(tmp_path: Path) -> None:
    assert edited(tmp_path / "a", "mistral", sliding_window=8).windows == (8,) * 4
    qwen2 = {"sliding_window": 8, "use_sliding_window": True}
    assert edited(tmp_path / "b", "qwen2", **qwen2, max_window_layers=3).windows == (0, 0, 0, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert edited(tmp_path / "c", "qwen3", **qwen2, layer_types=kinds).windows == (8, 0, 8, 0)


def test_kinds_of_layers_differ_in_windows_and_turns(tmp_path: Path) -> None:
    assert edited(tmp_path / "a", "gemma2").windows == (12, 0, 12, 0)
    gemma3 = edited(tmp_path / "b", "gemma3_text", rope_theta=1e6)
    assert gemma3.windows == (12, 12, 0, 12)
    local, full = RopeConfig(theta=100.0, dim=16), RopeConfig(theta=1e6, dim=16, scaling=LinearScaling(4.0))
    assert gemma3.layer_ropes == (local, local, full, local)
    smollm3 = edited(tmp_path / "c", "smollm3", no_rope_layers=None)
    assert [smollm3.rope_of(layer) is None for layer in range(4)] == [False, False, False, True]
    assert edited(tmp_path / "d", "olmo3").layer_ropes == (), "one base, no scaling: all turn alike"


def test_what_gemma_files_leave_out_is_gemmas(tmp_path: Path) -> None:
    left_out = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "tie_word_embeddings")
    config = edited(tmp_path, "gemma2", **dict.fromkeys(left_out))
    assert config.tie_word_embeddings
    numbers = config.arithmetic
    assert (numbers.attention_scale, numbers.score_cap, numbers.logit_cap) == (256**-0.5, 50.0, 30.0)
    assert (numbers.embedding_scale, numbers.norm_offset, numbers.activation) == (8.0, 1.0, "gelu_tanh")


def test_heads_follow_the_architecture_and_sentence_transformers(tmp_path: Path) -> None:
    labels = {"0": "no", "1": "yes"}
    classifier = edited(tmp_path / "a", "qwen3", architectures=["Qwen3ForSequenceClassification"], id2label=labels)
    assert (classifier.head, classifier.generates) == (HeadConfig("labels", ("no", "yes")), False)
    reward = edited(tmp_path / "b", architectures=["LlamaForSequenceClassification"], num_labels=1)
    assert reward.head.labels == ("LABEL_0",)
    assert edited(tmp_path / "c", "qwen3", architectures=["Qwen3Model"]).head == HeadConfig("nothing")
    for pooling, ours in (("lasttoken", "last"), ("mean", "mean")):
        path = make_embedding_model(tmp_path / pooling, bare=False, pooling=pooling)
        assert load_model_config(path).head == HeadConfig("nothing", pooling=ours)


BAD_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("architectures", "llama", {"architectures": ["GPT2LMHeadModel"]}),
    ("architectures", "llama", {"architectures": None}),
    ("architectures", "llama", {"architectures": [3]}),
    ("hidden_size", "llama", {"hidden_size": None}),
    ("hidden_size", "llama", {"hidden_size": "64"}),
    ("hidden_size", "llama", {"hidden_size": 66, "head_dim": None}),
    ("num_hidden_layers", "llama", {"num_hidden_layers": 0}),
    ("num_hidden_layers", "llama", {"num_hidden_layers": True}),
    ("num_hidden_layers", "llama", {"num_hidden_layers": 1 << 40}),
    ("num_key_value_heads", "llama", {"num_key_value_heads": 3}),
    ("head_dim", "llama", {"head_dim": 15}),
    ("rms_norm_eps", "llama", {"rms_norm_eps": "small"}),
    ("rope_theta", "llama", {"rope_theta": -1.0}),
    ("rope_scaling", "llama", {"rope_scaling": {"type": "ntk", "factor": 4.0}}),
    ("factor", "llama", {"rope_scaling": {"type": "dynamic"}}),
    ("model_max_length", "llama", {"model_max_length": 0}),
    ("rope_scaling", "llama", {"rope_scaling": {"type": "linear", "factor": -4.0}}),
    ("rope_scaling", "llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 0.5}}),
    ("long_factor", "phi3", {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 32}),
    ("rope_scaling", "llama", {"rope_scaling": [1]}),
    ("rope_scaling", "llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}),
    ("factor", "llama", {"rope_scaling": {**LLAMA3, "factor": None}}),
    ("partial_rotary_factor", "llama", {"partial_rotary_factor": 0.2}),
    ("partial_rotary_factor", "llama", {"partial_rotary_factor": 1.5}),
    ("kv_lora_rank", "deepseek_v3", {"kv_lora_rank": None}),
    ("qk_rope_head_dim", "deepseek_v3", {"qk_rope_head_dim": 15}),
    ("attention_bias", "deepseek_v3", {"attention_bias": True}),
    ("scoring_func", "deepseek_v3", {"scoring_func": "softmax"}),
    ("topk_method", "deepseek_v2", {"topk_method": "noaux_tc"}),
    ("norm_topk_prob", "deepseek_v2", {"norm_topk_prob": True}),
    ("moe_layer_freq", "deepseek_v2", {"moe_layer_freq": 2}),
    ("index_topk", "deepseek_v32", {"index_topk": None}),
    ("index_head_dim", "deepseek_v32", {"index_head_dim": 8}),
    ("q_lora_rank", "deepseek_v32", {"q_lora_rank": None}),
    ("num_experts", "qwen3_moe", {"num_experts": None}),
    ("num_experts_per_tok", "qwen3_moe", {"num_experts_per_tok": 9}),
    ("mlp_only_layers", "qwen3_moe", {"mlp_only_layers": 1}),
    ("n_group", "glm4_moe", {"n_group": 3}),
    ("topk_group", "glm4_moe", {"topk_group": 5}),
    ("num_experts_per_tok", "glm4_moe", {"topk_group": 1}),
    ("first_k_dense_replace", "glm4_moe", {"first_k_dense_replace": -1}),
    ("max_window_layers", "qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": "x"}),
    ("layer_types", "mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"]}),
    ("sliding_window", "mistral", {"sliding_window": 0}),
    ("layer_types", "qwen3_next", {"layer_types": ["linear_attention"] * 4}),
    ("layer_types", "qwen3_5_text", {"layer_types": ["linear_attention", "sliding_attention"] * 2}),
    ("linear_num_value_heads", "qwen3_next", {"linear_num_value_heads": 3}),
    ("linear_conv_kernel_dim", "qwen3_next", {"linear_conv_kernel_dim": 9}),
    ("mamba_n_heads", "granitemoehybrid", {"mamba_n_heads": 7}),
    ("mamba_n_heads", "granitemoehybrid", {"mamba_n_groups": 3}),
    ("mamba_d_head", "granitemoehybrid", {"mamba_d_head": 8}),
    ("mamba_d_conv", "granitemoehybrid", {"mamba_d_conv": 1}),
    ("ssm_multipliers", "falcon_h1", {"ssm_multipliers": [1.0, 1.0]}),
    ("mlp_multipliers", "falcon_h1", {"mlp_multipliers": [1.0, -1.0]}),
    ("attention_bias", "falcon_h1", {"projectors_bias": True}),
    ("mamba_proj_bias", "granitemoehybrid", {"mamba_proj_bias": True}),
    ("time_step_limit", "granitemoehybrid", {"time_step_limit": [1.0, 0.5]}),
    ("layer_types", "granitemoehybrid", {"layer_types": ["mamba"] * 4}),
    ("shared_expert_intermediate_size", "qwen3_next", {"shared_expert_intermediate_size": 0}),
    ("tie_word_embeddings", "llama", {"tie_word_embeddings": "yes"}),
    ("torch_dtype", "llama", {"torch_dtype": "float8_e4m3fn"}),
    ("eos_token_id", "llama", {"eos_token_id": 272}),
    ("eos_token_id", "llama", {"eos_token_id": ["</s>"]}),
    ("bos_token_id", "llama", {"bos_token_id": -1}),
    ("quantization_config", "llama", {"quantization_config": {"bits": 4}}),
    ("hidden_act", "llama", {"hidden_act": "gelu"}),
    ("hidden_activation", "gemma2", {"hidden_activation": "relu"}),
    ("hidden_act", "qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    ("query_pre_attn_scalar", "gemma2", {"query_pre_attn_scalar": 0}),
    ("attn_logit_softcapping", "gemma2", {"attn_logit_softcapping": -1.0}),
    ("sliding_window_pattern", "gemma3_text", {"sliding_window_pattern": 0}),
    ("residual_multiplier", "granite", {"residual_multiplier": "half"}),
    ("no_rope_layers", "smollm3", {"no_rope_layers": [1, 0]}),
    ("id2label", "llama", {"architectures": ["LlamaForSequenceClassification"], "id2label": {"1": "yes"}}),
    ("architectures", "mixtral", {"architectures": ["MixtralForSequenceClassification"]}),
    ("mlp_bias", "llama", {"mlp_bias": True}),
    ("qk_layernorm", "phi", {"qk_layernorm": True}),
    ("hidden_act", "phi", {"hidden_act": "relu"}),
    ("clip_qkv", "olmo", {"clip_qkv": 0}),
    ("mlp_layer_types", "glm4_moe_lite", {"mlp_layer_types": ["dense", "linear", "sparse", "sparse"]}),
    ("indexer_types", "glm_moe_dsa", {"indexer_types": ["full", "shared"] * 2}),
    ("index_topk_pattern", "glm_moe_dsa", {"index_topk_pattern": "FFSS"}),
    ("index_topk_freq", "glm_moe_dsa", {"index_topk_freq": 4}),
    ("attn_type_list", "minimax_m2", {"attn_type_list": [1, 0, 1, 1]}),
    ("shared_intermediate_size", "minimax_m2", {"shared_intermediate_size": 64}),
    ("scoring_func", "minimax_m2", {"scoring_func": "softmax"}),
    ("rotary_dim", "minimax_m2", {"rotary_dim": 32}),
]


@pytest.mark.parametrize(("field", "family", "changes"), BAD_FIELDS)
def test_a_bad_field_is_named_in_one_line(field: str, family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        edited(tmp_path, family, **changes)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: {field}: ")
    assert "\n" not in message


@pytest.mark.parametrize("content", ["{", "[]", "\x00", "[" * 100000])
def test_a_broken_file_is_named(content: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json: .*download the file again"):
        load_model_config(path)


def test_a_missing_directory_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model-path Qwen/Qwen3-0\.6B: no such directory"):
        load_model_config("Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"config\.json: missing"):
        load_model_config(str(tmp_path))


def test_the_signature_tells_apart_what_must_match(tmp_path: Path) -> None:
    base = edited(tmp_path / "a")
    same = edited(tmp_path / "b", max_position_embeddings=8192, eos_token_id=5, torch_dtype="bfloat16")
    assert base.signature() == same.signature()
    assert base.signature().startswith("LlamaForCausalLM/L4/kv2x16/V272/")
    for i, change in enumerate(({"rope_theta": 5e5}, {"num_hidden_layers": 3}, {"rms_norm_eps": 1e-5})):
        assert edited(tmp_path / str(i), **change).signature() != base.signature()
    assert base.quantized(None).signature() == base.signature()
    assert base.quantized("int4wo-64").signature() == f"{base.signature()}/int4wo-64", "the refusal names it"


def test_the_config_needs_no_torch() -> None:
    code = (
        "import sys; from engine.model_files.model_config import *; load_model_config(DEFAULT_MODEL_PATH);"
        "from tools.recall import oracle;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'safetensors', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_shipped_model_is_there() -> None:
    assert Path(DEFAULT_MODEL_PATH, "model.safetensors").is_file()


def test_latents_are_one_vector_of_a_token(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale_all_dim": 1.0}
    config = edited(tmp_path, "deepseek_v3", rope_scaling=yarn)
    assert (config.num_kv_heads, config.head_dim, config.rope.dim) == (1, 32 + 16, 16)
    assert config.latent is not None
    assert config.latent.scale == pytest.approx(48**-0.5 * (0.1 * math.log(4.0) + 1) ** 2)
    down, up = 64 * 48 + 48 * 4 * 48, 64 * 48 + 32 * 4 * (32 + 48)
    assert config.attention_weights() == down + up + 4 * 48 * 64
    assert config.pair_flops() == 2 * 4 * (48 + 32)
