"""Assembly of the engine of a leader or single rank: model, device, core."""

import random
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from engine.assembly.core import CoreConfig, build_core
from engine.assembly.leading import adapter_store, agreed_sizes, kv_memory, serving_device
from engine.assembly.loading import load_rank, resolved, weight_updater
from engine.assembly.memory import build_engine_memory
from engine.assembly.parts import EngineParts
from engine.config import EngineConfig
from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.core.mem_cache.state_slots import grid_of
from engine.device.machine import check_arithmetic
from engine.device.memory_plan import with_running_requests
from engine.device.pools import behind_windows
from engine.device.step_memory import THIS_MACHINE, UNIFIED, EngineUse, LocalMachine
from engine.executor.warm_up import CompileLog
from engine.flags.kv_events_config import parse_kv_events_config
from engine.flags.resolve import depth, limits, ratio_rule, step_budget
from engine.model_files.model_config import ModelConfig
from engine.ranks.group import Group
from engine.ranks.links import loader
from engine.recurrent import check_recurrent, cut_on_grid
from engine.speculative.decode_planning import decode_strategy


def build_engine(
    given: EngineConfig,
    stored: ModelConfig,
    *,
    use: EngineUse = UNIFIED,
    machine: LocalMachine = THIS_MACHINE,
    wakeup: Callable[[], None] = lambda: None,
    group: Group | None = None,
) -> EngineParts:
    """Load the model and allocate its memory. Raises ConfigError.

    `group`: of a leader, whose followers build their parts at the same time
    (engine/assembly/follower.py). Storage threads call `wakeup`.
    """
    config, model = resolved(given, stored, check_arithmetic)
    compiles = CompileLog() if config.device == "cuda" and find_spec("triton") else None
    load = loader(config, model, group.links if group else None, machine.load)
    fingerprinted = config.enable_hierarchical_cache or group is not None
    rank = load_rank(config, model, machine, load, fingerprinted=fingerprinted)
    if rank.recurrent:
        check_recurrent(config)
    sizes = agreed_sizes(rank, given, use, group)
    memory = build_engine_memory(rank, sizes, use, group, wakeup)
    device = serving_device(rank, memory, group, wakeup)
    pools, pages = memory.pools, memory.pools.kv.num_pages
    config = with_running_requests(given, sizes.config, pages=pages, slots=sizes.slots, windows=pools.num_windows)
    core = core_config(config, model, use, num_pages=pages, recurrent=rank.recurrent, backup_room=memory.room)
    scheduler, events = build_core(core, memory.parts(config))
    weights, trainers = weight_updater(config, stored, device, group, load=load, rename_pages=memory.rename_pages)
    return EngineParts(
        config=config,
        model=model,
        pool=pools.kv,
        kv=kv_memory(config, memory, device, group),
        device=device,
        adapters=adapter_store(device, group),
        group=group,
        held=sizes.held,
        scheduler=scheduler,
        depth=depth(config),
        weights=weights,
        trainers=trainers,
        storage=memory.tier.storage if memory.tier else None,
        events=events,
        memory=memory.report(config),
        layers_in_pages=[i for i, spec in enumerate(sizes.specs) if pools.windows is None or not spec.window],
        behind_windows=behind_windows(sizes.specs, sizes.kept),
        compiles=compiles,
        arrivals=memory.arrivals,
    )


def core_config(
    config: EngineConfig,
    model: ModelConfig,
    use: EngineUse,
    *,
    num_pages: int,
    recurrent: bool = False,
    backup_room: CopySize = NOTHING,
) -> CoreConfig:
    own_limits = cut_on_grid(limits(config), grid_of(config.page_size)) if recurrent else limits(config)
    enabled = not config.disable_radix_cache
    return CoreConfig(
        limits=replace(
            own_limits,
            reserve_floor=use.reserve_floor,
            resume_elsewhere=use.retracted_kv == "prefill",
            vocab_size=model.vocab_size,
        ),
        num_pages=num_pages,
        radix=enabled,
        eviction_policy=config.radix_eviction_policy,
        publishes=enabled and parse_kv_events_config(config.kv_events_config) is not None,
        ratio=ratio_rule(config),
        backup_room=backup_room,
        step_budget=step_budget(config, model, part_tokens=own_limits.part_tokens),
        decode=decode_strategy(config),
        uniform=random.Random(config.random_seed).random,
    )
