"""In bf16 on a CPU the way to a token changes no bit of any logprob, as long as decode's KV stays what decode wrote.

What an answer's tokens have in KV is computed by the kernel for single tokens; computed again, as a prompt, it has other last
bits. So recomputation is compared by tokens whose logits are far apart: test_ranks.py, tests/e2e/models/test_identity_matrix.py.
Latent attention has one kernel for both, and so not even that changes a bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.device.step_memory import EngineUse
from engine.kernels.linear import linear_kernel
from engine.messages import LogprobOptions
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import FOR_RANKS
from tests.models.tiny_checkpoints import make_tiny_checkpoint

PROMPTS = {"a": prompt_of(150, 1), "b": prompt_of(9, 2), "c": prompt_of(70, 3)}
FLAGS: dict[str, Any] = {"chunked_prefill_size": -1, "page_size": 4, "max_total_tokens": 2048}
HOST = EngineUse(retracted_kv="host")

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="products of torch depend on the batch")

# Flags, use, and how often it was at work.
WAYS: dict[str, tuple[dict[str, Any], EngineUse | None, Callable[[EngineInProcess], float]]] = {
    "chunked": ({"chunked_prefill_size": 32}, None, lambda e: e.parts.scheduler.counters.prefill_steps - 3),
    "overlap": ({"stream": "threaded", "stream_delay_s": 0.001}, None, lambda e: e.parts.depth - 1),
    "mixed": (
        {"chunked_prefill_size": 32, "enable_mixed_chunk": True},
        None,
        lambda e: e.parts.scheduler.counters.mixed_steps,
    ),
    "multiplexed": (
        {"chunked_prefill_size": 32, "enable_pdmux": True, "stream_delay_s": 0.001, "num_threads": 2},
        None,
        lambda e: e.parts.depth - 1,
    ),
    "cached prompts": ({}, None, lambda e: e.cached["again"]),
    "restored from the host": ({"test_retract": 3}, HOST, lambda e: e.parts.scheduler.counters.resumed_restored),
}


QWEN3 = {**FOR_RANKS, "intermediate_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # family, sizes, flags
    "qwen3": ("qwen3", QWEN3, {}),
    "KV of 8 bits": ("qwen3", QWEN3, {"kv_cache_dtype": "fp8_e4m3"}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Path and flags."""
    (family, sizes, flags), folder = FAMILIES[request.param], tmp_path_factory.mktemp("bits") / "model"
    return {"model_path": make_tiny_checkpoint(folder, family, dtype="bfloat16", **sizes), **FLAGS, **flags}


def answers(engine: EngineInProcess, names: dict[str, list[int]]) -> dict[str, Any]:
    for seed, (name, prompt) in enumerate(names.items()):
        engine.add(name, prompt, temperature=0.9, seed=seed, max_new_tokens=24, logprobs=LogprobOptions(-1, 2))
    engine.run()
    return {
        name: (engine.tokens[name], [(e.token_id, e.logprob, e.top) for e in engine.logprobs[name]]) for name in names
    }


@pytest.fixture(scope="module")
def plain(model: dict[str, Any]) -> dict[str, Any]:
    with EngineInProcess(**model) as engine:
        return answers(engine, PROMPTS)


@pytest.mark.parametrize("way", WAYS)
def test_the_way_changes_no_bit(way: str, model: dict[str, Any], plain: dict[str, Any]) -> None:
    flags, use, times = WAYS[way]
    with EngineInProcess(use=use, **{**model, **flags}) as engine:
        got = answers(engine, PROMPTS)
        assert got == plain
        if way == "cached prompts":
            assert answers(engine, {"again": PROMPTS["a"]})["again"] == plain["a"]
        assert times(engine) > 0, "not at work"


def test_latents_of_an_answer_computed_again_have_the_same_bits(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "deepseek_v3", dtype="bfloat16")
    with EngineInProcess(path, **FLAGS) as engine:
        plain = answers(engine, PROMPTS)
    with EngineInProcess(path, **FLAGS, test_retract=3, disable_radix_cache=True) as engine:
        assert answers(engine, PROMPTS) == plain
        assert engine.parts.scheduler.counters.retractions > 0
