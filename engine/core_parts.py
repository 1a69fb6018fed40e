"""Builds an engine's core: the bookkeeping of its memory, and the scheduler. Never torch."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.core.estimates import NewTokenRatio
from engine.core.mem_cache.backups import CopySize
from engine.core.mem_cache.cache_events import PrefixEvents, events_of_tree
from engine.core.mem_cache.match_rules import ByState, ByWindow
from engine.core.mem_cache.memory_part import MemoryPart, part_of
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import MatchRule, RadixCache, by_pages
from engine.core.mem_cache.radix_node import TreePart
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.memory import Memory
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.state import SchedulerState
from engine.flags.kv_events_config import parse_kv_events_config
from engine.flags.resolve import limits, priorities, ratio_rule, step_budget
from engine.flags.speculation import drafting_of
from engine.kv.kv_pool import AllocateBytes, zeroed_bytes
from engine.model_files.model_config import ModelConfig
from engine.recurrent import cut_on_grid

# ---- Engine requirements of worker roles.


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The defaults fit a unified worker.

    `decodes`, `prefills`: record such steps. `peers_write_pages`: no host tier, which needs stream
    order. `kv_stays`: why KV memory cannot be released. `retracted_kv`: as
    --disaggregation-decode-retraction-backup. `reserve_floor`: as in Limits. `receives_features`:
    from encoder workers.
    """

    decodes: bool = True
    prefills: bool = True
    peers_write_pages: bool = False
    kv_stays: str = ""
    retracted_kv: str = "recompute"
    reserve_floor: int = 0
    allocate_kv: AllocateBytes = zeroed_bytes
    receives_features: bool = False


UNIFIED = EngineUse()


# ---- core parts


def build_memory(
    config: EngineConfig, parts: Sequence[MemoryPart | None], *, num_pages: int
) -> tuple[Memory, PrefixEvents | None]:
    """Return the bookkeeping of all memory, and the prefix cache's events if published.

    `parts`: in the order of engine/core/mem_cache/memory_part.py, None for missing ones.
    """
    enabled = not config.disable_radix_cache
    return memory_of(
        PageAllocator(num_pages=num_pages, page_size=config.page_size),
        parts,
        enabled=enabled,
        policy=config.radix_eviction_policy,
        publishes=enabled and parse_kv_events_config(config.kv_events_config) is not None,
        rank=priorities(config).rank,
    )


def memory_of(
    allocator: PageAllocator,
    parts: Sequence[MemoryPart | None],
    *,
    enabled: bool = True,
    policy: str = "lru",
    publishes: bool = False,
    rank: Callable[[Request], int] = lambda request: 0,
) -> tuple[Memory, PrefixEvents | None]:
    """Return the `Memory` of `parts`, and its prefix tree's events if it `publishes`.

    `enabled` and `policy`: as in RadixCache.
    """
    present = [part for part in parts if part is not None]
    states, windows = part_of(StateSlots, present), part_of(WindowPages, present)
    events = events_of_tree(allocator.page_size, states=states, windows=windows) if publishes else None
    following = [part for part in (*present, events) if isinstance(part, TreePart)]
    tree = RadixCache(allocator, enabled=enabled, policy=policy, parts=following, rule=_match_rule(states, windows))
    return Memory(allocator, tree, present, rank=rank), events


def _match_rule(states: StateSlots | None, windows: WindowPages | None) -> MatchRule:
    """Return the rule for prefixes that a request can start from."""
    if states is not None:
        return ByState(states) if windows is None else ByState(states, whole=windows.is_whole)
    return by_pages if windows is None else ByWindow(windows)


def build_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    memory: Memory,
    use: EngineUse,
    *,
    backup_room: CopySize,
) -> Scheduler:
    """`backup_room`: for copies of retracted requests."""
    states = memory.part(StateSlots)
    own_limits = limits(config) if states is None else cut_on_grid(limits(config), states.grid)
    state = SchedulerState(
        limits=replace(
            own_limits,
            reserve_floor=use.reserve_floor,
            resume_elsewhere=use.retracted_kv == "prefill",
            vocab_size=model.vocab_size,
        ),
        memory=memory,
        ratio=NewTokenRatio(ratio_rule(config)),
        backup_room=backup_room,
    )
    return Scheduler(
        state,
        uniform=random.Random(config.random_seed).random,
        step_budget=step_budget(config, model, part_tokens=own_limits.part_tokens),
        drafting=drafting_of(config, decodes=use.decodes),
    )
