"""Flags that bound a step: durations and chunks for each device."""

import pytest

from engine.config import EngineConfig
from engine.core.estimates import RatioRule
from engine.core.policy import Limits
from engine.flags.resolve import depth, limits, ratio_rule, resolve, step_budget
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH, load_model_config
from service.flags import ConfigError


@pytest.mark.parametrize(
    ("flags", "device", "max_step_time_s"),
    [
        ({}, "cpu", 1.0),
        ({}, "cuda", 0.5),
        ({"max_step_time_s": 0.0}, "cpu", 0.0),
        ({"max_step_time_s": 0.025}, "cuda", 0.025),
        ({"chunked_prefill_size": -1}, "cpu", 0.0),
    ],
)
def test_a_step_has_a_time_for_each_device(flags: dict[str, float], device: str, max_step_time_s: float) -> None:
    model = load_model_config(DEFAULT_MODEL_PATH)
    config = resolve(EngineConfig(model_path=DEFAULT_MODEL_PATH, device=device, **flags), model, cuda=True)  # type: ignore[arg-type]
    assert config.max_step_time_s == max_step_time_s
    budget = step_budget(config, model, part_tokens=config.page_size)
    assert (budget is None) == (max_step_time_s == 0)
    if max_step_time_s >= 0.5:  # the shipped model is small: its first step is not cut either
        assert budget is not None and config.chunked_prefill_size is not None
        assert budget.tokens(budget.work, 0) > config.chunked_prefill_size


def test_a_time_for_steps_needs_chunks() -> None:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, chunked_prefill_size=-1, max_step_time_s=0.1)
    with pytest.raises(ConfigError, match="--max-step-time: needs chunks; leave --chunked-prefill-size -1 out"):
        resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=False)


def test_units_of_a_page_share_the_kv_heads() -> None:
    model = load_model_config(WIDE_MODEL_PATH)
    asked = {None: 1, 2: 2, 4: 4}
    for units, found in asked.items():
        assert resolve(EngineConfig(kv_units=units), model, cuda=False).kv_units == found
    with pytest.raises(ConfigError, match="--kv-units 3: does not divide the model's 4 KV heads; choose 1, 2 or 4"):
        resolve(EngineConfig(kv_units=3), model, cuda=False)


@pytest.mark.parametrize(
    ("asked", "page_size", "device", "chunk"),
    [
        (None, 16, "cpu", 1024),
        (None, 16, "cuda", 8192),
        (None, 48, "cpu", 1008),
        (500, 16, "cpu", 496),
        (-1, 16, "cpu", -1),
    ],
)
def test_chunks_suit_the_device_and_the_page(asked: int | None, page_size: int, device: str, chunk: int) -> None:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, chunked_prefill_size=asked, page_size=page_size, device=device)
    assert resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=True).chunked_prefill_size == chunk


@pytest.mark.parametrize(
    ("asked", "device", "mixed"),
    [(None, "cpu", True), (None, "cuda", False), (False, "cpu", False), (True, "cuda", True)],
)
def test_answers_go_on_beside_prompts_on_a_cpu_by_default(asked: bool | None, device: str, mixed: bool) -> None:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, enable_mixed_chunk=asked, device=device)
    assert resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=True).enable_mixed_chunk is mixed


def test_the_rest_of_the_scheduler_has_the_constants_of_the_core() -> None:
    model = load_model_config(DEFAULT_MODEL_PATH)
    default = resolve(EngineConfig(device="cpu"), model, cuda=False)
    assert ratio_rule(default) == RatioRule()
    bare = Limits(page_size=1, max_running_requests=1, max_queued_requests=1)
    assert limits(default).sibling_tokens == bare.sibling_tokens
    assert limits(default).min_shared_tokens == bare.min_shared_tokens
    cautious = resolve(EngineConfig(device="cpu", schedule_conservativeness=0.6), model, cuda=False)
    assert ratio_rule(cautious) == RatioRule(conservativeness=0.6)


def test_steps_overlap_on_a_cpu_with_a_threaded_stream_and_on_a_gpu_always() -> None:
    model = load_model_config(DEFAULT_MODEL_PATH)
    for flags, stream, steps in (
        ({"device": "cpu"}, "inline", 1),
        ({"device": "cpu", "stream": "threaded"}, "threaded", 2),
        ({"device": "cpu", "stream": "threaded", "disable_overlap_schedule": True}, "threaded", 1),
        ({"device": "cuda"}, "cuda", 2),
    ):
        found = resolve(EngineConfig(**flags), model, cuda=True)
        assert (found.stream, depth(found)) == (stream, steps)
