"""What --load-format means: which paths have made-up weights. Never torch."""

from pathlib import Path

from engine.config import DUMMY, EngineConfig
from service.flags import ConfigError


def check_load_format(config: EngineConfig) -> None:
    """`config` has local paths. Raises ConfigError."""
    if config.load_format != DUMMY:
        return
    for path in dummy_paths(config):
        if path and Path(path).is_file():
            raise ConfigError(
                f"--load-format {DUMMY}: {path} is a file with its weights; give a directory with a config.json, or leave the flag out"
            )


def dummy_paths(config: EngineConfig) -> frozenset[str]:
    """Return the checkpoints whose weights are made up: the model's, and that of what drafts for it."""
    if config.load_format != DUMMY:
        return frozenset()
    drafter = config.speculative_draft_model_path
    return frozenset([config.model_path] if drafter is None else [config.model_path, drafter])
