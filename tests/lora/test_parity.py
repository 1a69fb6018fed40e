"""Adapters applied per token, against the same adapters merged into the weights by hand, in transformers and in the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.messages import LogprobOptions
from engine.model_files.model_config import load_model_config
from engine.models.load import load_model
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.test_parity import MAX_ERROR, greedy
from tests.lora.tiny_adapters import make_tiny_adapter, merge
from tests.models.tiny_checkpoints import make_tiny_checkpoint

# name -> (how it is made, scale by end of name)
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "all": ({"seed": 1}, {"": 2.0}),
    "rslora": ({"seed": 2, "rank": 16, "use_rslora": True, "targets": ("q_proj", "v_proj", "down_proj")}, {"": 2.0}),
    "patterns": (
        {
            "seed": 3,
            "targets": ("k_proj", "o_proj", "gate_proj"),
            "ranks": {"k_proj": 8},
            "rank_pattern": {"k_proj": 8},
            "alpha_pattern": {"self_attn.o_proj": 2},
        },
        {"k_proj": 1.0, "o_proj": 0.5, "": 2.0},
    ),
}
NUMBERS = {name: number for number, name in enumerate(ADAPTERS, 1)}


@pytest.fixture(scope="module", params=["qwen3", "glm4"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Paths: {"adapters": {name: directory}, "merged": {name: checkpoint, "": the model alone}}."""
    folder = tmp_path_factory.mktemp("lora")
    base = make_tiny_checkpoint(folder / "base", request.param)
    adapters = {name: make_tiny_adapter(folder / name, base, **made) for name, (made, _) in ADAPTERS.items()}
    merged = {
        name: merge(folder / f"merged-{name}", base, request.param, adapters[name], scales)
        for name, (_, scales) in ADAPTERS.items()
    }
    return {"adapters": adapters, "merged": {"": base, **merged}}


def start(models: dict[str, dict[str, str]], **flags: object) -> EngineInProcess:
    engine = EngineInProcess(models["merged"][""], enable_lora=True, **flags)
    store = engine.parts.device.adapters
    assert store is not None
    for name, path in models["adapters"].items():
        store.install(NUMBERS[name], store.read(path))
    return engine


PATHS: dict[str, dict[str, Any]] = {
    "chunked": {"chunked_prefill_size": 64},
    "overlap": {"stream": "threaded", "stream_delay_s": 0.002, "chunked_prefill_size": 48, "enable_mixed_chunk": True},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_mixed_batch_gives_what_merged_weights_give(models: dict[str, dict[str, str]], path: str) -> None:
    """All adapters and the model alone side by side, on one shared prompt; then again, from the cache."""
    prompt = prompt_of(150, 7)
    with start(models, **PATHS[path]) as engine:
        for turn in ("first", "again"):
            for name in models["merged"]:
                options = LogprobOptions(-1, 0)
                engine.add(f"{name}-{turn}", prompt, logprobs=options, adapter=NUMBERS.get(name, 0))
                engine.add(f"{name}-{turn}-short", prompt[:9], adapter=NUMBERS.get(name, 0))
            engine.run()
    answers = set()
    for name, merged in models["merged"].items():
        model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
        tokens, logprobs = greedy(model, prompt)
        answers.add(tuple(tokens))
        short, _ = greedy(model, prompt[:9])
        for turn in ("first", "again"):
            assert engine.tokens[f"{name}-{turn}-short"] == short
            assert engine.tokens[f"{name}-{turn}"] == tokens
            for i, entry in enumerate(engine.logprobs[f"{name}-{turn}"]):
                assert entry.logprob == pytest.approx(logprobs[i, entry.token_id].item(), abs=MAX_ERROR)
        assert engine.cached[f"{name}-first"] == 0 and engine.cached[f"{name}-again"] == 144
    assert len(answers) == len(models["merged"])  # they differ, or nothing was tested


def test_batches_retractions_and_other_adapters_change_no_token(models: dict[str, dict[str, str]]) -> None:
    """One by one with merged weights = all at once, with retractions, two adapters a batch, at depth 2."""
    wanted, asked = {}, {}
    for name, merged in models["merged"].items():
        alone = EngineInProcess(merged)
        for i in range(2):
            asked[f"{name}-{i}"] = prompt_of(20 + i, i), NUMBERS.get(name, 0)
            alone.answer(f"{name}-{i}", asked[f"{name}-{i}"][0], max_new_tokens=40)
        wanted |= alone.tokens
        alone.close()
    memory = {"max_total_tokens": 224, "page_size": 4, "test_retract": 7}
    flags = {"max_loras_per_batch": 2, "stream": "threaded", **memory}
    with start(models, **flags) as engine:
        for rid, (prompt, adapter) in asked.items():
            engine.add(rid, prompt, max_new_tokens=40, adapter=adapter)
        engine.run()
    assert engine.parts.scheduler.counters.retractions > 0
    assert engine.tokens == wanted


def test_an_adapter_leaves_in_stream_order_and_new_weights_keep_the_others(
    models: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Steps in flight when an adapter is installed, removed, or the model replaced compute with what they were planned for."""
    engine = start(models, stream="threaded", stream_delay_s=0.003)
    store, prompt = engine.parts.device.adapters, prompt_of(30, 1)
    assert store is not None
    wanted = {}
    for name in ("all", "rslora"):
        with EngineInProcess(models["merged"][name]) as alone:
            alone.answer(name, prompt, max_new_tokens=12)
        wanted |= alone.tokens
    try:
        engine.add("all", prompt, max_new_tokens=12, adapter=NUMBERS["all"])
        for _ in range(5):
            engine.turn()
        assert engine.pipeline.num_launched
        store.remove(NUMBERS["rslora"])
        store.install(9, store.read(models["adapters"]["rslora"]))
        engine.add("rslora", prompt, max_new_tokens=12, adapter=9)
        engine.turn()
        base = models["merged"][""]
        same = load_model(base, load_model_config(base), dtype="float32", device="cpu", progress=False)
        engine.parts.weights.take(same, model_path=base, version=None)
        engine.run()
    finally:
        engine.close()
    assert engine.tokens == wanted


def test_bfloat16_layers_take_adapters_too(models: dict[str, dict[str, str]]) -> None:
    """On a CPU their weights are repacked; the delta is added all the same."""
    with start(models, dtype="bfloat16") as engine:
        for name in ("", "all"):
            engine.add(name or "base", prompt_of(40, 5), adapter=NUMBERS.get(name, 0), logprobs=LogprobOptions(0, 0))
        engine.run()
    merged = AutoModelForCausalLM.from_pretrained(models["merged"]["all"], dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = merged(torch.tensor([prompt_of(40, 5)])).logits[0].log_softmax(-1)
    exact = [rows[i, t].item() for i, t in enumerate(prompt_of(40, 5)[1:])]
    errors = {
        rid: sum(abs(e.logprob - x) for e, x in zip(engine.input_logprobs[rid][1:], exact, strict=True))  # type: ignore[operator]
        for rid in ("base", "all")
    }
    assert errors["all"] < errors["base"] / 4
