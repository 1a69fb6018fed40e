"""Memory of a rank: sizes of a leader and followers alike, and what a leader keeps of requests.

measured steps -> sizes that fit this rank -> ranks agree -> pools
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.assembly.core import MemoryParts
from engine.config import EngineConfig
from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.device.feature_pool import arrivals, arriving_bytes
from engine.device.host_copies import backup_bytes, backup_room
from engine.device.kv_memory import held_by, kept_specs, note_memory
from engine.device.measure import LargestSteps, StepsOver, measured
from engine.device.memory_plan import MeasuredMemory, kv_pages, with_fitting_prompts, with_state_slots
from engine.device.pools import Pools, build_pools, why_kept
from engine.device.step_memory import EngineUse, LoadedRank, StepMemory
from engine.flags.images import cache_bytes, image_cache
from engine.flags.resolve import state_slots
from engine.flags.speculation import max_drafted
from engine.hicache.build import HostTier, build_host_tier, weights_of_pages, without_files
from engine.kv.cache_spec import CacheSpec, KVShard, page_bytes_of
from engine.kv.kv_pool import KVPool, kv_identity
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place
from engine.pdmux.build import streams_per_phase
from engine.ranks.group import Group, rank_files
from engine.ranks.messages import NO_LIMIT, PoolSize, Ready
from engine.recurrent import make_state_slots, with_states


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Sizes of a rank's memory. `config`: with the steps that fit.

    `found`: measured, if at all. `slots`: of recurrent states, of `slot_bytes` each; `shadows`:
    more for drafts; else 0. `others_slot_bytes`: of all followers. `kept`:
    why KV behind windows is, or "".
    """

    config: EngineConfig
    found: MeasuredMemory | None
    held: KVShard
    specs: list[CacheSpec]
    kept: str
    num_pages: int
    slots: int
    shadows: int
    slot_bytes: int
    states: str = ""
    others_slot_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        return (1 + self.slots + self.shadows) * self.slot_bytes

    def ready(self, files: str) -> Ready:
        """Return what a follower sends. `files`: fingerprint of its weights."""
        config = self.config
        assert config.chunked_prefill_size is not None and config.max_prefill_tokens is not None, "resolved"
        slots, shadows = (self.slots, self.shadows) if self.slot_bytes else (NO_LIMIT, NO_LIMIT)
        steps = config.chunked_prefill_size, config.max_prefill_tokens
        return Ready(self.num_pages, files, slots, shadows, *steps, self.slot_bytes)

    def at_most(self, least: Ready) -> "MemorySizes":
        """A leader's sizes that every follower has room for."""
        config = self.config
        assert config.chunked_prefill_size is not None and config.max_prefill_tokens is not None, "resolved"
        slots = least.state_slots if least.state_slots < state_slots(config) else config.max_mamba_cache_size
        config = replace(
            config,
            chunked_prefill_size=min(config.chunked_prefill_size, least.chunked_prefill_size),
            max_prefill_tokens=min(config.max_prefill_tokens, least.max_prefill_tokens),
            max_mamba_cache_size=slots,
        )
        return replace(
            self,
            config=config,
            num_pages=min(self.num_pages, least.num_pages),
            slots=state_slots(config) if self.slot_bytes else 0,
            shadows=min(self.shadows, least.shadow_slots),
            others_slot_bytes=least.slot_bytes,
        )

    def placed(self, agreed: PoolSize) -> "MemorySizes":
        config = replace(
            self.config,
            chunked_prefill_size=agreed.chunked_prefill_size,
            max_mamba_cache_size=agreed.state_slots or None,
        )
        return replace(self, config=config, num_pages=agreed.num_pages, shadows=agreed.shadow_slots)

    def pools(self, use: EngineUse, *, apart: bool) -> Pools:
        """Allocate KV; `apart` separates window layers. Raises ConfigError."""
        units = len(self.held.units)
        return build_pools(
            self.config, self.specs, num_pages=self.num_pages, units=units, apart=apart, allocate=use.allocate_kv
        )

    def identity(self, pool: KVPool, model: ModelConfig, *, version: str = "", files: str = "") -> KVIdentity:
        config = self.config
        ranks = f"{config.tp_size} ranks{'/whole experts' if config.ep_size > 1 else ''}"
        sums = f"{config.reduce_units} units" if config.reduce_units else ranks
        weights = f"{version[:64]}/{files}"
        pages = kv_identity(pool, model, dtype=config.dtype, weights=weights, held=self.held, sums=sums)
        return with_states(pages, self.states, self.slot_bytes)


def fitting_sizes(
    rank: LoadedRank, given: EngineConfig, use: EngineUse, place: Place, steps_over: StepsOver
) -> MemorySizes:
    """Measure the largest steps, and divide the rest of the memory. Raises ConfigError."""
    config, model = rank.config, rank.model_config
    held, specs = held_by(config, model, place), kept_specs(config, rank.model.cache_specs())
    kept = why_kept(config, specs, recurrent=rank.recurrent)
    found = measured(LargestSteps(rank, use, place, steps_over, apart=not kept))
    if found is not None:
        if config.enable_pdmux:
            found = found.at_once(streams_per_phase(config))
        if rank.model.vision is not None:
            found = replace(found, features=cache_bytes(config) + arriving_bytes(config, model, use))
        config, found = with_fitting_prompts(given, config, found, recurrent=rank.recurrent)
    slots, shadows, slot_bytes = 0, 0, rank.slot_bytes
    if slot_bytes:
        drafted = max_drafted(config)
        config, shadows = with_state_slots(given, config, found, slot_bytes=slot_bytes, drafted=drafted)
        slots = state_slots(config)
    sizes = MemorySizes(config, found, held, specs, kept, 0, slots, shadows, slot_bytes, rank.states)
    page_bytes = page_bytes_of(specs, config.page_size, units=len(held.units))
    return replace(sizes, num_pages=kv_pages(given, config, found, page_bytes=page_bytes, states=sizes.state_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """`room`: for copies of retracted requests. `arrivals`: pages of features from encoder workers.

    It outlives the weights, so it holds none.
    """

    model: ModelConfig
    sizes: MemorySizes
    use: EngineUse
    pools: Pools
    tier: HostTier | None
    room: CopySize
    arrivals: KVPool | None

    def pool_size(self) -> PoolSize:
        sizes, tier = self.sizes, self.tier
        assert sizes.config.chunked_prefill_size is not None, "resolved"
        return PoolSize(
            num_pages=sizes.num_pages,
            host_pages=tier.memory.pool.num_pages if tier else 0,
            host_states=tier.memory.num_states if tier else 0,
            backup_room=self.room,
            files=tier.files if tier else "",
            state_slots=sizes.slots,
            shadow_slots=sizes.shadows,
            apart=not sizes.kept,
            chunked_prefill_size=sizes.config.chunked_prefill_size,
        )

    def of_steps(self) -> StepMemory:
        return StepMemory(
            pool=self.pools.kv,
            windows=self.pools.windows,
            shadows=self.sizes.shadows,
            arrivals=self.arrivals,
            host_pool=self.tier.memory.pool if self.tier else None,
            host_states=self.tier.memory.states if self.tier else None,
            backup_room=self.room,
        )

    def parts(self, config: EngineConfig) -> MemoryParts:
        states = None
        if self.sizes.slot_bytes:
            peers_write = self.use.peers_write_pages or self.use.pins_states or self.room != NOTHING
            states = make_state_slots(config, peers_write=peers_write, num_shadows=self.sizes.shadows)
        return MemoryParts(
            host=self.tier.cache if self.tier else None,
            states=states,
            windows=self.pools.window_pages(),
            images=image_cache(config, self.model),
        )

    def report(self, config: EngineConfig) -> dict[str, int]:
        """Log and return bytes by use."""
        tier, pools, sizes = self.tier, self.pools, self.sizes
        tier_bytes = tier.memory.size_bytes if tier else 0
        return note_memory(
            config,
            sizes.found,
            {**pools.bytes_by_name(), "states": sizes.state_bytes},
            copies=tier_bytes + backup_bytes(self.room, pools, slot_bytes=sizes.slot_bytes),
            tokens=pools.kv.num_pages * config.page_size,
            shadows=sizes.shadows,
        )

    def rename_pages(self, version: str, files: str) -> None:
        if self.tier is not None:
            identity = self.sizes.identity(self.pools.kv, self.model, version=version, files=files)
            self.tier.cache.use_identity(identity)


def build_engine_memory(
    rank: LoadedRank, sizes: MemorySizes, use: EngineUse, group: Group | None, wakeup: Callable[[], None]
) -> EngineMemory:
    """Raises ConfigError. Storage threads call `wakeup`."""
    config, model, host = sizes.config, rank.model_config, rank.machine.host
    pools = sizes.pools(use, apart=not sizes.kept)
    tier, room = None, NOTHING
    if config.enable_hierarchical_cache:
        files = weights_of_pages(config, rank.files)
        identity = sizes.identity(pools.kv, model, version=config.weight_version, files=files)
        slot_bytes = sizes.others_slot_bytes
        ranks = rank_files(config, model, sizes.specs, group.followers, slot_bytes=slot_bytes) if group else None
        tiers = without_files(config) if use.peers_write_pages else config
        tier = build_host_tier(tiers, pools.kv, identity, slots=sizes.slots, wakeup=wakeup, host=host, ranks=ranks)
    if use.retracted_kv == "host":
        free_bytes = host.available() // config.ranks_here
        room = backup_room(config, pools, slots=sizes.slots, slot_bytes=sizes.slot_bytes, free_bytes=free_bytes)
    return EngineMemory(
        model=model,
        sizes=sizes,
        use=use,
        pools=pools,
        tier=tier,
        room=room,
        arrivals=arrivals(config, model, use),
    )
