"""Puts the core of an engine together: its memory's bookkeeping and the scheduler over it. Never torch."""

import random
from dataclasses import replace

from engine.config import EngineConfig
from engine.core.backups import CopySize
from engine.core.growth import MeasuredGrowth
from engine.core.host_cache import HostCache
from engine.core.image_cache import ImageCache
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.page_allocator import PageAllocator
from engine.core.radix_cache import RadixCache
from engine.core.scheduler import Scheduler
from engine.core.state import SchedulerState
from engine.core.state_slots import StateSlots
from engine.core.usable_prefixes import PrefixEvents, events_of_tree
from engine.core.window_pages import WindowPages
from engine.flags.kv_events_config import parse_kv_events_config
from engine.flags.resolve import limits, priorities, ratio_rule, step_budget
from engine.flags.speculation import drafting_of
from engine.model_files.model_config import ModelConfig
from engine.recurrent import cut_on_grid
from engine.use import EngineUse


def build_memory(
    config: EngineConfig,
    *,
    num_pages: int,
    host: HostCache | None,
    states: StateSlots | None,
    windows: WindowPages | None,
    images: ImageCache | None = None,
) -> tuple[Memory, PrefixEvents | None]:
    """Return the bookkeeping of all memory, and the events of its prefix cache if they are published. `config` is resolved."""
    published = parse_kv_events_config(config.kv_events_config) is not None and not config.disable_radix_cache
    events = events_of_tree(config.page_size, states=states, windows=windows) if published else None
    allocator = PageAllocator(num_pages=num_pages, page_size=config.page_size)
    cache = RadixCache(
        allocator,
        enabled=not config.disable_radix_cache,
        policy=config.radix_eviction_policy,
        below=host,
        listener=events,
        states=states,
        windows=windows,
    )
    rank = priorities(config).rank
    memory = Memory(
        allocator=allocator, cache=cache, host=host, states=states, windows=windows, images=images, rank=rank
    )
    return memory, events


def build_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    memory: Memory,
    use: EngineUse,
    *,
    backup_room: CopySize,
) -> Scheduler:
    """`backup_room`: for copies of retracted requests."""
    own_limits = limits(config) if memory.states is None else cut_on_grid(limits(config), memory.states.grid)
    state = SchedulerState(
        limits=replace(
            own_limits,
            reserve_floor=use.reserve_floor,
            resume_elsewhere=use.retracted_kv == "prefill",
            vocab_size=model.vocab_size,
        ),
        memory=memory,
        ratio=NewTokenRatio(ratio_rule(config)),
        growth=MeasuredGrowth(),
        backup_room=backup_room,
    )
    return Scheduler(
        state,
        uniform=random.Random(config.random_seed).random,
        step_budget=step_budget(config, model, part_tokens=own_limits.part_tokens),
        drafting=drafting_of(config, decodes=use.decodes),
    )
