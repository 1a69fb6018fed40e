"""Settings for models with recurrent states."""

from dataclasses import replace

import msgspec

from engine.config import EngineConfig
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.core.mem_cache.state_slots import StateSlots, grid_of
from engine.core.policy import Limits
from engine.flags.resolve import state_slots
from engine.kv.kv_pool import hashed_if_long
from service.flags import ConfigError


def check_recurrent(config: EngineConfig) -> None:
    """Raises ConfigError."""
    assert config.chunked_prefill_size is not None, "resolved"
    grid = grid_of(config.page_size)
    if 0 < config.chunked_prefill_size < grid:
        raise ConfigError(
            f"--chunked-prefill-size {config.chunked_prefill_size}: prompts of a model with recurrent states are cut at multiples of "
            f"{grid} tokens (--page-size {config.page_size}); give {grid} or more, or -1"
        )


def make_state_slots(config: EngineConfig, *, peers_write: bool, num_shadows: int) -> StateSlots:
    """`peers_write`: peers or host copies write outside stream order."""
    return StateSlots(
        num_slots=state_slots(config),
        grid=grid_of(config.page_size),
        keeps_snapshots=not config.disable_radix_cache,
        peers_write=peers_write,
        num_shadows=num_shadows,
    )


def with_states(pages: KVIdentity, layout: str, slot_bytes: int) -> KVIdentity:
    if not slot_bytes:
        return pages
    whole = hashed_if_long(f"{pages.layout}/states {layout}")
    return msgspec.structs.replace(pages, layout=whole, state_bytes=slot_bytes)


def cut_on_grid(limits: Limits, grid: int) -> Limits:
    chunk = limits.chunked_prefill_size
    return replace(limits, grid=grid, chunked_prefill_size=None if chunk is None else chunk // grid * grid)
