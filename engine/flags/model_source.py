"""Local files for --model-path: a directory, GGUF file, known name or hub model."""

from dataclasses import replace
from pathlib import Path

from engine.config import DUMMY, EngineConfig
from engine.model_files.drafter_config import DRAFT_PATH
from engine.model_files.hub import RECALL_WIDE, SMOLLM2, download, is_model_id, smollm2_file
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH
from service.flags import ConfigError


def with_local_model(config: EngineConfig) -> EngineConfig:
    """Replace the model path by local files, downloading them; keep the served name.

    Existing paths have precedence. Raises ConfigError.
    """
    weights = config.load_format != DUMMY
    if config.speculative_draft_model_path is not None:
        drafter = _local_drafter(config.speculative_draft_model_path, weights=weights)
        config = replace(config, speculative_draft_model_path=drafter)
    given = config.model_path
    by_name = bool(given) and not Path(given).exists()
    on_hub = by_name and given not in (SMOLLM2, RECALL_WIDE) and is_model_id(given)
    if config.revision is not None and not on_hub:
        raise ConfigError(
            f"--revision {config.revision}: only models of the Hugging Face hub have revisions; leave it out "
            f"(--model-path {given or 'is not given'})"
        )
    if on_hub:
        return _served_as(config, download(given, config.revision, weights=weights))
    if by_name and given == SMOLLM2:
        return _served_as(config, str(smollm2_file()))
    if by_name and given == RECALL_WIDE:
        return _served_as(config, WIDE_MODEL_PATH)
    return replace(config, model_path=given or DEFAULT_MODEL_PATH)


def _local_drafter(given: str, *, weights: bool) -> str:
    if given == SMOLLM2 and not Path(given).exists():
        return str(smollm2_file())
    on_hub = is_model_id(given) and not Path(given).exists()
    return download(given, None, option=DRAFT_PATH, weights=weights) if on_hub else given


def _served_as(config: EngineConfig, path: str) -> EngineConfig:
    name = config.served_model_name or config.model_path
    return replace(config, model_path=path, served_model_name=name, revision=None)


# ---- --load-format: dummy weights.


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


def why_no_tensors(config: EngineConfig) -> str:
    """The reason that an engine takes new weights only from a checkpoint, or ""."""
    if config.nnodes > 1:
        return f"--nnodes {config.nnodes}: ranks of several machines take new weights from a checkpoint alone"
    if Path(config.model_path).is_file():
        return f"{config.model_path}: tensors of a GGUF file cannot be replaced; start with a directory of safetensors"
    return ""
