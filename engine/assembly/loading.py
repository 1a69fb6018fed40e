"""Flags and weights of a rank at start, and new weights while it serves."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from engine.config import EngineConfig, ModelFlags
from engine.device.device import Device
from engine.device.step_memory import LoadedRank, LocalMachine, await_share
from engine.executor.model_runner import RunningModel
from engine.executor.warm_up import CudaGauge
from engine.executor.weights import WeightActions, WeightUpdater
from engine.flags.model_source import dummy_paths, why_no_tensors
from engine.flags.resolve import resolve
from engine.flags.speculation import with_drafter
from engine.kv.kv_pool import fingerprint_of
from engine.loop.trainer_control import Trainers
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.models.load import ChangedFiles, Load
from engine.ranks.group import Group, GroupWeights
from engine.trainers.changes import TensorChanges
from engine.trainers.groups import GroupTrainers, TrainerGroups, follower_readers
from service.flags import ConfigError

M = TypeVar("M")  # model type


def resolved(
    given: EngineConfig, stored: ModelConfig, check: Callable[[EngineConfig], None]
) -> tuple[EngineConfig, ModelConfig]:
    """Return flags and model as this rank computes, and set its threads. Raises ConfigError."""
    config = resolve(given, stored, cuda=torch.cuda.is_available())
    check(config)
    assert config.num_threads is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    return config, with_drafter(config, stored.quantized(config.quantization))


def load_rank(
    config: EngineConfig, model_config: ModelConfig, machine: LocalMachine, load: Load, *, fingerprinted: bool
) -> LoadedRank:
    """Wait for this rank's share of a GPU, and load its weights. Raises ConfigError."""
    host = machine.host
    if machine.gauge is None and config.device == "cuda":
        machine = replace(machine, gauge=CudaGauge(torch.device("cuda")))
    if machine.gauge is not None and config.max_total_tokens is None:
        assert config.mem_fraction_static is not None, "resolved"
        await_share(machine.gauge, config.mem_fraction_static)
    before, free = host.own(), host.available() // (config.dp_size * config.ranks_here)
    path, files = config.model_path, fingerprint_of(config) if fingerprinted else ""
    try:
        model = load(path, model_config, progress=machine.progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--model-path {path}: the GPU has no memory for its weights ({error})") from None
    if fingerprinted and fingerprint_of(config) != files:
        raise ConfigError(f"--model-path {path}: its files changed while they were read; start again")
    return LoadedRank(config, model_config, machine, model, files, free, max(0, host.own() - before))


def share_loader(config: ModelFlags, read: Load) -> Load:
    """`read` of a follower, in stream order. It raises ConfigError."""

    def load(path: str, found: ModelConfig, *, progress: bool, **more: Any) -> DenseDecoder:
        try:
            share = read(path, found, progress=progress, **more)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"{path}: the GPU has no memory for this rank's share of its weights ({error})") from None
        if config.device == "cuda":
            torch.cuda.synchronize()  # the copies were enqueued on this thread's stream
        return share

    return load


def over_running(load: Load, running: RunningModel) -> Load:
    """`load` for updates by tensors, which shares the unchanged layers of `running`."""

    def read(
        path: str, found: ModelConfig, *, progress: bool, changed: Sequence[str] = (), adds: bool = False
    ) -> DenseDecoder:
        if not changed:
            return load(path, found, progress=progress)
        return load(path, found, progress=progress, changes=ChangedFiles(changed, running.model if adds else None))

    return read


def weight_updater(
    config: EngineConfig,
    stored: ModelConfig,
    device: Device,
    group: Group | None,
    *,
    load: Load,
    rename_pages: Callable[[str, str], None],
) -> tuple[WeightUpdater[DenseDecoder], Trainers]:
    """`stored`: the checkpoint's config. `rename_pages` gets the new version and fingerprint."""

    runners = [stream.runner for stream in device.executor.streams]
    load = over_running(load, runners[0].running)

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
    return updater_of(config, stored, actions, group)


def updater_of(
    config: EngineConfig, stored: ModelConfig, actions: WeightActions[M], group: Group | None = None
) -> tuple[WeightUpdater[M], Trainers]:
    own = trainer_groups(config, rank=0 if group is None else group.links.place.rank)
    trainers = own if group is None else GroupTrainers(own, group.followers)
    updater = WeightUpdater(
        path=config.model_path,
        version=config.weight_version,
        model=stored,
        actions=actions,
        on_cuda=config.device == "cuda",
        dummies=dummy_paths(config),
        changes=why_no_tensors(config) or TensorChanges(trainers, dummies=dummy_paths(config)),
        undoes=config.dp_size > 1,
    )
    return updater, trainers


def trainer_groups(config: EngineConfig, *, rank: int) -> TrainerGroups:
    ranks, refusal = config.num_ranks, why_no_tensors(config)
    return TrainerGroups(rank=rank, num_ranks=ranks, timeout_s=config.dist_timeout_s, refusal=refusal)


def trainer_calls(
    config: EngineConfig, *, rank: int
) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
    """Return what a follower does for trainers during steps, and between them, by name."""
    groups = trainer_groups(config, rank=rank)
    return follower_readers(groups), {"leave_trainer": lambda group: groups.leave(group)}
