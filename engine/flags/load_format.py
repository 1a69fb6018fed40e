"""--load-format: dummy weights."""

from pathlib import Path

from engine.config import DUMMY, EngineConfig
from service.flags import ConfigError


def check_load_format(config: EngineConfig) -> None:
    """Raises ConfigError for a file with weights."""
    if config.load_format != DUMMY:
        return
    for path in dummy_paths(config):
        if path and Path(path).is_file():
            raise ConfigError(
                f"--load-format {DUMMY}: {path} is a file with its weights; give a directory with a config.json, or leave the flag out"
            )


def dummy_paths(config: EngineConfig) -> frozenset[str]:
    if config.load_format != DUMMY:
        return frozenset()
    drafter = config.speculative_draft_model_path
    return frozenset([config.model_path] if drafter is None else [config.model_path, drafter])
