"""Memory of a leader or single rank: pools, and the rooms that keep something of requests.

`MEMORY_ROOMS` lists the rooms with a part of request memory, in the order of
engine/core/mem_cache/memory_part.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.assembly.loading import LoadedRank
from engine.assembly.sizes import MemorySizes
from engine.config import EngineConfig
from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.core.mem_cache.memory_part import MemoryPart
from engine.device.feature_pool import arrivals
from engine.device.host_copies import backup_bytes, backup_room
from engine.device.kv_memory import note_memory
from engine.device.pools import Pools, why_kept
from engine.device.step_memory import EngineUse, StepMemory
from engine.flags.images import image_cache
from engine.hicache.build import HostTier, build_host_tier
from engine.kv.kv_pool import KVPool
from engine.ranks.group import Group, rank_files
from engine.ranks.messages import PoolSize
from engine.recurrent import make_state_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """`room`: for copies of retracted requests. `arrivals`: pages of features from encoder workers.

    `kept`: why KV behind windows is kept, or "".
    """

    rank: LoadedRank
    sizes: MemorySizes
    use: EngineUse
    pools: Pools
    kept: str
    tier: HostTier | None
    room: CopySize
    arrivals: KVPool | None

    def pool_size(self) -> PoolSize:
        """Return what every follower allocates."""
        sizes, tier, room = self.sizes, self.tier, self.room
        assert sizes.config.chunked_prefill_size is not None, "resolved"
        return PoolSize(
            num_pages=sizes.num_pages,
            host_pages=tier.pool.num_pages if tier else 0,
            backup_pages=room.pages,
            backup_windows=room.windows,
            backup_states=room.states,
            files=tier.files if tier else "",
            state_slots=sizes.slots,
            shadow_slots=sizes.shadows,
            apart=not self.kept,
            chunked_prefill_size=sizes.config.chunked_prefill_size,
        )

    def of_steps(self) -> StepMemory:
        return StepMemory(
            pool=self.pools.kv,
            windows=self.pools.windows,
            shadows=self.sizes.shadows,
            arrivals=self.arrivals,
            host_pool=self.tier.pool if self.tier else None,
            backup_room=self.room,
        )

    def parts(self, config: EngineConfig) -> list[MemoryPart]:
        """Return the parts of request memory. `config`: with the requests that fit."""
        return [part for room in MEMORY_ROOMS if (part := room(self, config)) is not None]

    def report(self, config: EngineConfig) -> dict[str, int]:
        """Log and return bytes by use."""
        tier, pools, sizes = self.tier, self.pools, self.sizes
        tier_bytes = tier.pool.num_pages * tier.pool.page_bytes if tier else 0
        return note_memory(
            config,
            sizes.found,
            {**pools.bytes_by_name(), "states": sizes.state_bytes},
            copies=tier_bytes + backup_bytes(self.room, pools, slot_bytes=sizes.slot_bytes),
            tokens=pools.kv.num_pages * config.page_size,
            shadows=sizes.shadows,
        )

    def rename_pages(self, version: str, files: str) -> None:
        """Name pages by new weights from now on."""
        if self.tier is not None:
            identity = self.sizes.identity(self.pools.kv, self.rank.model_config, version=version, files=files)
            self.tier.cache.use_identity(identity)


def has_host_tier(config: EngineConfig, use: EngineUse) -> bool:
    return config.enable_hierarchical_cache and not use.peers_write_pages


def build_engine_memory(
    rank: LoadedRank, sizes: MemorySizes, use: EngineUse, group: Group | None, wakeup: Callable[[], None]
) -> EngineMemory:
    """Allocate pools and host memory. Raises ConfigError.

    `wakeup`: called when files were read or written.
    """
    config, model, host = sizes.config, rank.model_config, rank.machine.host
    kept = why_kept(config, sizes.specs, use, recurrent=rank.recurrent)
    pools = sizes.pools(use, apart=not kept)
    tier, room = None, NOTHING
    if has_host_tier(config, use):
        identity = sizes.identity(pools.kv, model, version=config.weight_version, files=rank.files)
        ranks = rank_files(config, model, sizes.specs, group.followers) if group else None
        tier = build_host_tier(config, pools.kv, identity, wakeup=wakeup, host=host, ranks=ranks)
    if use.retracted_kv == "host":
        free_bytes = host.available() // config.ranks_here
        room = backup_room(config, pools, slots=sizes.slots, slot_bytes=sizes.slot_bytes, free_bytes=free_bytes)
    return EngineMemory(
        rank=rank,
        sizes=sizes,
        use=use,
        pools=pools,
        kept=kept,
        tier=tier,
        room=room,
        arrivals=arrivals(config, model, use),
    )


# ---- The rooms' parts of request memory.


def _host_tier(memory: EngineMemory, config: EngineConfig) -> MemoryPart | None:
    return memory.tier.cache if memory.tier else None


def _states(memory: EngineMemory, config: EngineConfig) -> MemoryPart | None:
    if not memory.rank.recurrent:
        return None
    peers_write = memory.use.peers_write_pages or memory.room != NOTHING
    return make_state_slots(config, peers_write=peers_write, num_shadows=memory.sizes.shadows)


def _windows(memory: EngineMemory, config: EngineConfig) -> MemoryPart | None:
    return memory.pools.window_pages()


def _images(memory: EngineMemory, config: EngineConfig) -> MemoryPart | None:
    return image_cache(config, memory.rank.model_config)


MEMORY_ROOMS: Sequence[Callable[[EngineMemory, EngineConfig], MemoryPart | None]] = (
    _host_tier,
    _states,
    _windows,
    _images,
)
