"""Flags of the loop's listeners: out of range is one line that names the flag."""

import pytest

from engine.config import ConfigError, EngineConfig
from engine.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.resolve import resolve


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream_interval", 0),
        ("scheduler_recv_interval", -1),
        ("decode_log_interval", 0),
        ("watchdog_timeout", -0.5),
        ("prefault_tokens", -2),
    ],
)
def test_out_of_range_names_the_flag(field: str, value: float) -> None:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-") + ": must be"):
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
