"""Loads an engine's weights at start, and new ones while it serves."""

from collections.abc import Callable
from functools import partial

import torch

from engine.config import EngineConfig
from engine.device.device import Device
from engine.executor.weights import WeightActions, WeightUpdater
from engine.flags.model_source import dummy_paths
from engine.kv.kv_pool import fingerprint_of
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.ranks.group import Group, GroupWeights
from engine.ranks.links import Load
from service.flags import ConfigError


def load_at_start(
    config: EngineConfig, model: ModelConfig, load: Load, *, fingerprinted: bool, progress: bool
) -> tuple[DenseDecoder, str]:
    """Return the model and its files' fingerprint ("" if not wanted). Raises ConfigError."""
    path = config.model_path
    files = fingerprint_of(config) if fingerprinted else ""
    try:
        loaded = load(path, model, progress=progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--model-path {path}: the GPU has no memory for its weights ({error})") from None
    if fingerprinted and fingerprint_of(config) != files:
        raise ConfigError(f"--model-path {path}: its files changed while they were read; start again")
    return loaded, files


def weight_updater(
    config: EngineConfig,
    stored: ModelConfig,
    device: Device,
    group: Group | None,
    *,
    load: Load,
    rename_pages: Callable[[str, str], None],
) -> WeightUpdater[DenseDecoder]:
    """Return all ranks' weight updater. `stored`: the checkpoint's config.

    `rename_pages` gets the new version and fingerprint.
    """

    runners = [stream.runner for stream in device.executor.streams]

    def install(other: DenseDecoder) -> None:
        def use() -> None:
            for runner in runners:
                runner.running.use(other, needs_graphs=group is not None)

        device.executor.call(use)

    def drop() -> None:
        def drop_all() -> None:
            for runner in runners:
                runner.running.drop()

        device.executor.call(drop_all)

    actions = WeightActions(load=load, install=install, drop=drop, taken=rename_pages)
    if group is not None:
        everywhere = GroupWeights(group.followers, load=load, install=install)
        actions = WeightActions(
            load=everywhere.load,
            install=everywhere.install,
            drop=partial(everywhere.drop, drop),
            taken=rename_pages,
            discard=everywhere.discard,
        )
    return WeightUpdater(
        model_path=config.model_path,
        version=config.weight_version,
        model=stored,
        actions=actions,
        on_cuda=config.device == "cuda",
        dummies=dummy_paths(config),
    )
