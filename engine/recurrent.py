"""Settings for models with recurrent states."""

from dataclasses import replace

from engine.config import EngineConfig
from engine.core.mem_cache.state_slots import StateSlots, grid_of
from engine.core.policy import Limits
from engine.flags.resolve import state_slots
from service.flags import ConfigError

NEEDS = "a model with recurrent states cannot go on from pages alone"


def check_recurrent(config: EngineConfig) -> None:
    """Raise ConfigError for features that keep pages without states."""
    if config.enable_hierarchical_cache:
        raise ConfigError(f"--enable-hierarchical-cache: keeps pages of KV, and {NEEDS}; leave it out")
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


def cut_on_grid(limits: Limits, grid: int) -> Limits:
    chunk = limits.chunked_prefill_size
    return replace(limits, grid=grid, chunked_prefill_size=None if chunk is None else chunk // grid * grid)
