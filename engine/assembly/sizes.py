"""Sizes of a rank's memory, of the leader and its followers alike.

measured steps -> sizes that fit this rank -> ranks agree -> pools
"""

from dataclasses import dataclass, replace

from engine.assembly.loading import LoadedRank
from engine.config import EngineConfig
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.device.feature_pool import arriving_bytes
from engine.device.kv_memory import held_by, kept_specs
from engine.device.measure import LargestSteps, StepsOver, measured
from engine.device.memory_plan import MeasuredMemory, kv_pages, with_fitting_prompts, with_state_slots
from engine.device.pools import Pools, build_pools
from engine.device.step_memory import EngineUse
from engine.flags.images import cache_bytes
from engine.flags.resolve import state_slots
from engine.flags.speculation import max_drafted
from engine.kv.cache_spec import CacheSpec, KVShard, page_bytes_of
from engine.kv.kv_pool import KVPool, kv_identity
from engine.kv.state_pool import StatePool
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place
from engine.ranks.messages import NO_LIMIT, PoolSize, Ready


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Sizes of a rank's memory. `config`: with the steps that fit.

    `found`: measured, if at all. `slots`: of recurrent states, of `slot_bytes` each; `shadows`:
    more for drafts. All three are 0 without recurrent layers.
    """

    config: EngineConfig
    found: MeasuredMemory | None
    held: KVShard
    specs: list[CacheSpec]
    num_pages: int
    slots: int
    shadows: int
    slot_bytes: int

    @property
    def state_bytes(self) -> int:
        return (1 + self.slots + self.shadows) * self.slot_bytes

    def ready(self, files: str) -> Ready:
        """Return what a follower sends. `files`: fingerprint of its weights."""
        config = self.config
        assert config.chunked_prefill_size is not None and config.max_prefill_tokens is not None, "resolved"
        slots, shadows = (self.slots, self.shadows) if self.slot_bytes else (NO_LIMIT, NO_LIMIT)
        return Ready(self.num_pages, files, slots, shadows, config.chunked_prefill_size, config.max_prefill_tokens)

    def at_most(self, least: Ready) -> "MemorySizes":
        """Return a leader's sizes that every follower has room for."""
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
        )

    def placed(self, agreed: PoolSize) -> "MemorySizes":
        """Return a follower's sizes as its leader has agreed them with all ranks."""
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
        """Return the name of this rank's part of pages by weights of `version` and `files`."""
        return kv_identity(
            pool,
            model,
            dtype=self.config.dtype,
            version=version,
            fingerprint=files,
            held=self.held,
            tp_size=self.config.tp_size,
            reduce_units=self.config.reduce_units,
            whole_experts=self.config.ep_size > 1,
        )


def fitting_sizes(
    rank: LoadedRank, given: EngineConfig, use: EngineUse, place: Place, steps_over: StepsOver
) -> MemorySizes:
    """Measure the largest steps, and divide the rest of the memory. `given`: flags.

    Raises ConfigError.
    """
    config, model = rank.config, rank.model_config
    largest = LargestSteps(
        config=config,
        model_config=model,
        model=rank.model,
        place=place,
        decodes=use.decodes,
        prefills=use.prefills,
        progress=rank.machine.progress,
        steps_over=steps_over,
    )
    found = measured(largest, rank.machine.gauge, rank.machine.host, free=rank.free, weights=rank.weights)
    if found is not None:
        if config.enable_pdmux:
            found = found.at_once()
        if rank.model.vision is not None:
            found = replace(found, features=cache_bytes(config) + arriving_bytes(config, model, use))
        config, found = with_fitting_prompts(given, config, found, recurrent=rank.recurrent)
    slots = shadows = slot_bytes = 0
    if rank.recurrent:
        slot_bytes = StatePool.slot_bytes_of(rank.model.state_specs())
        drafted = max_drafted(config, decodes=use.decodes)
        config, shadows = with_state_slots(given, config, found, slot_bytes=slot_bytes, drafted=drafted)
        slots = state_slots(config)
    held, specs = held_by(config, model, place), kept_specs(config, rank.model.cache_specs())
    sizes = MemorySizes(config, found, held, specs, 0, slots, shadows, slot_bytes)
    page_bytes = page_bytes_of(specs, config.page_size, units=len(held.units))
    return replace(sizes, num_pages=kv_pages(given, config, found, page_bytes=page_bytes, states=sizes.state_bytes))
