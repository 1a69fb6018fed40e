"""KV pools of a rank, with or without one for window layers, and their release."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.config import EngineConfig, ModelFlags
from engine.core.mem_cache.window_pages import WindowPages
from engine.device.kv_memory import allocate_pool
from engine.device.windows import WindowGroup, window_group
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import AllocateBytes, KVPool
from engine.kv.pool_memory import MappedMemory, SavedMemory
from engine.kv.state_pool import StatePool
from engine.loop.control import FixedKV, KVMemory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """`kv` of all layers, or with `windows` of the others; `group` divides memory."""

    kv: KVPool
    windows: KVPool | None = None
    group: WindowGroup | None = None
    saver: SavedMemory | None = None

    def window_pages(self) -> WindowPages | None:
        return None if self.group is None else self.group.make_pages(self.kv.page_size)

    @property
    def num_windows(self) -> int:
        return 0 if self.group is None else self.group.window_pages // self.group.pages_of_window

    def bytes_by_name(self) -> dict[str, int]:
        windows = {} if self.windows is None else {"window_pages": self.windows.buffer.nbytes}
        return {"kv_pages": self.kv.buffer.nbytes, **windows}

    def buffers(self, states: StatePool | None) -> list[Tensor]:
        pools = [self.kv] if self.windows is None else [self.kv, self.windows]
        return [*(pool.buffer for pool in pools), *([] if states is None else [states.buffer])]

    def memory(self, config: ModelFlags, states: StatePool | None) -> KVMemory:
        if config.device == "cpu":
            return MappedMemory(self.buffers(states))
        return self.saver or FixedKV("on a GPU KV memory is released by workers that start with --enable-memory-saver")


def build_pools(
    config: EngineConfig,
    specs: Sequence[CacheSpec],
    *,
    num_pages: int,
    units: int,
    apart: bool,
    allocate: AllocateBytes,
) -> Pools:
    """`apart` separates window layers. Raises ConfigError."""
    saver = SavedMemory() if config.enable_memory_saver and config.device == "cuda" else None
    allocate = saver.allocate if saver else allocate
    beside, inside = divided(specs, apart=apart)
    if not inside:
        return Pools(kv=allocate_pool(config, specs, num_pages=num_pages, units=units, allocate=allocate), saver=saver)
    group = window_group(config, specs, pages=num_pages, units=units)
    return Pools(
        kv=allocate_pool(config, beside, num_pages=group.num_pages, units=units, allocate=allocate),
        windows=allocate_pool(config, inside, num_pages=group.window_pages, units=units, allocate=allocate),
        group=group,
        saver=saver,
    )


def divided(specs: Sequence[CacheSpec], *, apart: bool) -> tuple[list[CacheSpec], list[CacheSpec]]:
    """Layers of the pool that keeps all KV, and layers of the window pool."""
    inside = [spec for spec in specs if spec.window and apart]
    return [spec for spec in specs if not (spec.window and apart)], inside


def scratch_pools(
    config: EngineConfig, specs: Sequence[CacheSpec], *, units: int, apart: bool
) -> tuple[KVPool, KVPool | None]:
    """Pools of a page with the layers of those to come: kernels are compiled for their strides."""
    beside, inside = divided(specs, apart=apart)
    sizes: dict[str, Any] = {"num_pages": 1, "page_size": config.page_size, "device": config.device, "units": units}
    return KVPool(beside, **sizes), KVPool(inside, **sizes) if inside else None


def why_kept(config: EngineConfig, specs: Sequence[CacheSpec], *, recurrent: bool) -> str:
    """Return why KV before windows is kept and masked, "" if freed."""
    reasons = {
        "--disable-hybrid-swa-memory": config.disable_hybrid_swa_memory,
        "--enable-hierarchical-cache": config.enable_hierarchical_cache,
        f"--pp-size {config.pp_size}": config.pp_size > 1,  # each rank has all layers
        "--enable-dp-attention": config.enable_dp_attention,  # and each step
        f"--speculative-algorithm {config.speculative_algorithm}": any(spec.drafter for spec in specs),
        "the model's latent attention": any(spec.latent for spec in specs),
        "the model's recurrent states": recurrent,
    }
    return next((reason for reason, prevents in reasons.items() if prevents), "")


def behind_windows(specs: Sequence[CacheSpec], kept: str) -> str | None:
    if not any(spec.window for spec in specs):
        return None
    found = f"kept: {kept}" if kept else "freed"
    log.info("KV behind the windows of %d layers is %s", sum(spec.window > 0 for spec in specs), found)
    return found
