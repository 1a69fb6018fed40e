"""Flags that bound a step: durations and chunks for each device."""

import pytest

from engine.config import EngineConfig
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.resolve import resolve, step_budget
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
    budget = step_budget(config, model)
    assert (budget is None) == (max_step_time_s == 0)
    if max_step_time_s >= 0.5:  # the shipped model is small: its first step is not cut either
        assert budget is not None and config.chunked_prefill_size is not None
        assert budget.tokens(budget.work, 0) > config.chunked_prefill_size


def test_a_time_for_steps_needs_chunks() -> None:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, chunked_prefill_size=-1, max_step_time_s=0.1)
    with pytest.raises(ConfigError, match="--max-step-time: needs chunks; leave --chunked-prefill-size -1 out"):
        resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=False)


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
def test_answers_go_on_beside_prompts_on_a_cpu_unless_told(asked: bool | None, device: str, mixed: bool) -> None:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, enable_mixed_chunk=asked, device=device)
    assert resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=True).enable_mixed_chunk is mixed
