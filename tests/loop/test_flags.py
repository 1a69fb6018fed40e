"""Flags of the loop's listeners: out of range is one line that names the flag."""

import pytest

from engine.config import ConfigError, EngineConfig
from engine.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.resolve import resolve


@pytest.mark.parametrize(
    ("field", "value"),
    [("stream_interval", 0), ("scheduler_recv_interval", -1), ("decode_log_interval", 0), ("watchdog_timeout", -0.5)],
)
def test_out_of_range_names_the_flag(field: str, value: float) -> None:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-") + ": must be at least"):
        resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=False)
