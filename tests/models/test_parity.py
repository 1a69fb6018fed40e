"""Logits and greedy tokens of every family equal those of transformers, fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from tests.models.float64_oracle import Float64Oracle
from tests.models.reference_attend import Sequence
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so that the 8 pairs fall in all three ranges
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    "short_factor": [1.0] * 8,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama-rope-parameters": ("llama", {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-exact-range": ("llama", {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 8.0}}),
    "llama-yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral": ("mistral", {}),
    "mistral-one-kv-head": ("mistral", {"num_key_value_heads": 1}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {"q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v2-yarn": ("deepseek_v2", {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "deepseek-v3-odd-sizes": (
        "deepseek_v3",
        {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14, "q_lora_rank": 22},
    ),
    "deepseek-v32": ("deepseek_v32", {}),
    "deepseek-v3-yarn": ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-kinds-of-rope": (
        "gemma3_text",
        {
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gpt-oss": ("gpt_oss", {}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-norm-first": ("falcon_h1", {"mamba_norm_before_gate": True}),
    "falcon-h1-without-norm": ("falcon_h1", {"mamba_rms_norm": False, "mamba_n_groups": 1}),
    "granite": ("granite", {}),
    "granite-hybrid": ("granitemoehybrid", {}),
    "granite-hybrid-dense": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4-all-turned": ("glm4", {"partial_rotary_factor": 1.0}),
    "glm4-yarn": ("glm4", {"rope_scaling": YARN}),
    "glm4-moe": ("glm4_moe", {}),
    "glm-5": ("glm_moe_dsa", {}),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "glm4-moe-lite-kinds": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 2},
    ),
    "minimax-m2": ("minimax_m2", {}),
    "mixtral": ("mixtral", {}),
    "olmo": ("olmo", {}),
    "olmo-wide": ("olmo", {"clip_qkv": None, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3-yarn": ("olmo3", {"rope_scaling": YARN}),
    "phi": ("phi", {}),
    "phi-yarn": ("phi", {"rope_scaling": YARN, "num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
    "phi3-part": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    # the whole of the 40 + 32 tokens lies beyond the original context, where transformers takes the long factors too
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-longrope-part": (  # Phi-4-mini: 12 of 16 dims
        "phi3",
        {
            "rope_scaling": {name: LONGROPE[name][:6] for name in ("long_factor", "short_factor")}
            | {"type": "longrope"},
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-5": ("qwen3_5_text", {}),
    "qwen3-5-moe": ("qwen3_5_moe_text", {}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-not-normalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "smollm3": ("smollm3", {}),
    "smollm3-bias": ("smollm3", {"attention_bias": True}),
    "qwen3-sharded": ("qwen3", {"shards": 3}),
}


def load_ours(path: str, *, dtype: str) -> DenseDecoder:
    return load_model(path, load_model_config(path), dtype=dtype, device="cpu", progress=False)


def random_ids(count: int, *, seed: int = 1) -> list[int]:
    return torch.randint(16, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def their_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    path = make_tiny_checkpoint(tmp_path, family, **overrides)
    ours, prompt = load_ours(path, dtype="float32"), random_ids(40)
    tokens = Sequence(ours).greedy(prompt, 32)
    assert len(set(tokens)) > 8, "a model that repeats itself proves little"
    whole = prompt + tokens
    exact = Float64Oracle(path).logits(whole)
    assert tokens == exact.value[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert exact.value.std() > 0.5
    exact.check(Sequence(ours).extend(whole))


def test_bf16_is_as_close_to_fp32_as_transformers_bf16_is(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    prompt = random_ids(64)
    exact = their_logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), prompt)
    our_error = (Sequence(load_ours(path, dtype="bfloat16")).extend(prompt) - exact).abs().mean()
    their_error = (their_logits(theirs, prompt) - exact).abs().mean()
    assert 0 < our_error < 1.25 * their_error


def test_cache_specs_follow_the_config(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        specs = load_ours(path, dtype=dtype).cache_specs()
        assert [spec.bytes_per_token() for spec in specs] == [2 * 2 * 16 * itemsize] * 3
