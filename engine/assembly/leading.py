"""A leader's part in its group: agreement on sizes, the device, and what acts on all ranks.

A single rank has no group.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from engine.assembly.memory import EngineMemory, MemorySizes, fitting_sizes
from engine.config import EngineConfig
from engine.device.device import Device, build_device, own_steps
from engine.device.measure import warm
from engine.device.step_memory import EngineUse, LoadedRank, RankSeat, Recording
from engine.executor.executor import Executor
from engine.executor.model_runner import DeviceOutOfMemory
from engine.executor.warm_up import by_executor
from engine.loop.control import FixedKV, KVMemory
from engine.lora.bank import LoraStore
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import ALONE
from engine.pdmux.build import build_lanes
from engine.ranks.group import Group, GroupAdapters, GroupKVMemory
from engine.ranks.links import future_map_of, stage_input
from engine.ranks.rank_parts import check_same_kernels, kernels_here
from service.flags import ConfigError


def agreed_sizes(rank: LoadedRank, given: EngineConfig, use: EngineUse, group: Group | None) -> MemorySizes:
    config, model = rank.config, rank.model_config
    if group is not None and config.max_total_tokens is None:
        group.followers.await_loaded(timeout_s=group.timeout_s)
    seat = _seat(config, model, group)
    sizes = fitting_sizes(rank, given, use, seat.place, partial(own_steps, config, model, rank.model, seat))
    if group is None:
        return sizes
    return sizes.at_most(group.followers.await_ready(fingerprint=rank.files, timeout_s=group.timeout_s))


def serving_device(rank: LoadedRank, memory: EngineMemory, group: Group | None, wakeup: Callable[[], None]) -> Device:
    """Build this rank's device while followers build theirs, and run every kind of step on all.

    Raises ConfigError.
    """
    config = memory.sizes.config
    model, machine = rank.model_config, rank.machine
    if group is not None:
        group.followers.place(memory.pool_size())
    records = Recording(
        decodes=machine.decodes, prefills=machine.prefills, capture=machine.capture, progress=machine.progress
    )
    seat = _seat(config, model, group)
    make = partial(build_device, config, model, rank.model, memory.of_steps(), seat=seat)
    device = build_lanes(make, config, records, attention=wakeup) if config.enable_pdmux else make(records=records)
    if group is not None:
        attention = wakeup if config.watches_steps else None
        executor = Executor(device.executor.streams, ranks=group.followers, attention=attention)
        device = replace(device, executor=executor)
        group.followers.await_serving(timeout_s=group.timeout_s)
        check_same_kernels(kernels_here(), group.followers.apply("kernels").wait())
    if machine.gauge is not None:
        _warm(replace(rank, config=config), memory, device.executor)
    return device


def kv_memory(config: EngineConfig, memory: EngineMemory, device: Device, group: Group | None) -> KVMemory:
    if memory.use.kv_stays:
        return FixedKV(f"{memory.use.kv_stays}; name the tag weights alone")
    own = memory.pools.memory(config, device.states)
    return own if group is None else GroupKVMemory(own, group.followers)


def adapter_store(device: Device, group: Group | None) -> LoraStore | GroupAdapters | None:
    own = device.adapters
    return own if group is None or own is None else GroupAdapters(own, group.followers)


def _seat(config: EngineConfig, model: ModelConfig, group: Group | None) -> RankSeat:
    if group is None:
        return RankSeat(place=ALONE)
    assert config.max_running_requests is not None, "resolved"
    device, slots = torch.device(config.device), config.max_running_requests
    return RankSeat(
        place=group.links.place,
        exchange=group.links.exchange,
        future_map=future_map_of(group.links, leads=True, device=device, num_slots=slots),
        inputs=stage_input(group.links, config, model),
    )


def _warm(rank: LoadedRank, memory: EngineMemory, executor: Executor) -> None:
    """Repeat the measured steps on the engine that serves, with its graphs. Raises ConfigError."""
    config = rank.config
    assert config.context_length is not None, "resolved"
    positions = min(memory.pools.kv.num_pages * config.page_size, config.context_length)
    streams = executor.streams if config.enable_pdmux else (executor,)
    try:
        for run in map(by_executor, streams):
            warm(rank, run, positions=positions)
    except DeviceOutOfMemory as error:
        raise ConfigError(
            f"--mem-fraction-static: no memory is left for the largest step beside the KV cache ({error}); lower it or "
            "--max-total-tokens"
        ) from None
