"""Families that differ in RoPE, norms and layout of the checkpoint, mix experts, or see a window: transformers' tokens, however they are computed and on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.device.step_memory import EngineUse
from engine.kernels.linear import linear_kernel
from engine.model_files.model_config import load_model_config
from tests.cells import some
from tests.engine.engine_in_process import prompt_of
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.engine.ranks.ranks_in_process import engine_of
from tests.engine.test_parity import greedy
from tests.models.test_parity import YARN
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("deepseek_v2", {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v32": ("deepseek_v32", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gpt-oss": ("gpt_oss", {"seed": 2}),
    "granite": ("granite", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4-moe": ("glm4_moe", {}),
    "glm-5": ("glm_moe_dsa", {}),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-one-group": ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": False}),
    "granite-hybrid": ("granitemoehybrid", {}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "minimax-m2": ("minimax_m2", {}),
    "mixtral": ("mixtral", {}),
    "mistral-window": ("mistral", {"sliding_window": 12}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"rope_scaling": YARN}),
    "olmo": ("olmo", {}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.75}),
    "qwen2-windows": ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3-5": ("qwen3_5_text", {}),
    "qwen3-5-moe": ("qwen3_5_moe_text", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-next": ("qwen3_next", {}),
    "smollm3": ("smollm3", {}),
}
# Ranks cut heads, latents, windows with sinks, states of both kinds and experts; one family of each.
OF_EACH_LAYOUT = ("deepseek-v32", "falcon-h1", "gemma2", "glm4-moe", "gpt-oss", "qwen3-next")
PROMPTS = [prompt_of(70, 1), prompt_of(9, 2), prompt_of(33, 3)]
WAYS: dict[str, dict[str, Any]] = {
    "chunks, retracted": {"chunked_prefill_size": 32, "test_retract": 2},
    "overlap": {"stream": "threaded", "stream_delay_s": 0.001},
    "two ranks": {"tp_size": 2, "num_threads": 1},
    "two stages": {"pp_size": 2, "num_threads": 1},
}


def as_they_come() -> list[Any]:
    """All; slow are those without a field of their own: test_parity.py and tests/e2e/models/zoo.py try them in the same ways."""
    return [name if fields else pytest.param(name, marks=pytest.mark.slow) for name, (_, fields) in FAMILIES.items()]


@pytest.fixture(scope="module", params=as_they_come())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    family, overrides = FAMILIES[request.param]
    return make_tiny_checkpoint(tmp_path_factory.mktemp("family") / request.param, family, **overrides)


def chunk_of(path: str, size: int) -> int:
    """`size`, or what models with recurrent states cut prompts at."""
    return size if load_model_config(path).recurrent is None else 64


def tokens_of(path: str, **flags: Any) -> dict[str, list[int]]:
    with engine_of(path, page_size=4, max_total_tokens=1024, **flags) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(str(i), prompt, max_new_tokens=8)
        engine.run()
        return engine.tokens


def test_every_way_gives_the_tokens_of_transformers(checkpoint: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    wanted = {str(i): greedy(theirs, prompt)[0] for i, prompt in enumerate(PROMPTS)}
    assert tokens_of(checkpoint) == wanted
    for way, flags in WAYS.items():
        if "chunked_prefill_size" in flags:
            flags = flags | {"chunked_prefill_size": chunk_of(checkpoint, 32)}
        assert tokens_of(checkpoint, **flags) == wanted, way


@pytest.mark.skipif(linear_kernel() is None, reason="reduce units need the C kernel of bf16")
@pytest.mark.parametrize(
    "name",  # without those whose norm of q and k sums over the ranks
    some(sorted(FAMILIES.keys() - {"minimax-m2", "olmo2", "olmo3"}), tried=OF_EACH_LAYOUT),
)
def test_two_ranks_give_the_bits_of_one_in_bf16(name: str, tmp_path: Path) -> None:
    family, overrides = FAMILIES[name]
    path = make_tiny_checkpoint(tmp_path, family, dtype="bfloat16", **overrides)
    flags: dict[str, Any] = {"dtype": "bfloat16", "reduce_units": 2, "num_threads": 1}
    alone = tokens_of(path, **flags)
    assert tokens_of(path, tp_size=2, **flags) == alone
    # KV goes to the host and comes back: computed again, as a prompt, an answer's tokens have other last bits (test_equal_bits.py)
    kept = EngineUse(retracted_kv="host")
    assert tokens_of(path, chunked_prefill_size=chunk_of(path, 16), test_retract=2, use=kept, **flags) == alone


@pytest.mark.skipif(linear_kernel() is None, reason="reduce units need the C kernel of bf16")
def test_dp_ranks_share_experts(tmp_path: Path) -> None:
    """Dense layers, experts and the expert of all tokens, for rows of both ranks; one of them has less to do."""
    path = make_tiny_checkpoint(tmp_path, "glm4_moe", dtype="bfloat16")
    flags: dict[str, Any] = {"dtype": "bfloat16", "reduce_units": 2, "num_threads": 1}
    alone = tokens_of(path, **flags)
    with dp_ranks(path, tp_size=2, dp_size=2, page_size=4, max_total_tokens=1024, **flags) as group:
        for i, prompt in enumerate(PROMPTS):
            group.engines[i % 2].add(str(i), prompt, max_new_tokens=8)
        group.run()
        assert {rid: tokens for engine in group.engines for rid, tokens in engine.tokens.items()} == alone
