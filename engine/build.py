"""Puts an engine together: the model and its device, the core, the host tier. The only place that knows all of them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.core.cache_events import CacheEvents
from engine.core.finish import TailTexts
from engine.core.growth import MeasuredGrowth
from engine.core.host_cache import HostCache
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.page_allocator import PageAllocator
from engine.core.page_keys import KVIdentity
from engine.core.radix_cache import RadixCache
from engine.core.scheduler import Scheduler, SchedulerSettings
from engine.core.state import SchedulerState
from engine.device import Device, MakeCapture, allocate_pool, build_device, default_capture
from engine.executor.weights import WeightUpdater
from engine.hicache.build import HostTier, build_host_tier
from engine.kv.identity import fingerprint, kv_identity
from engine.kv.kv_pool import KVPool
from engine.kv_events_config import parse_kv_events_config
from engine.loop.disk_pump import DiskPump
from engine.model_files.model_config import ModelConfig
from engine.models.causal_lm import CausalLM
from engine.models.registry import load_model
from engine.resolve import depth, limits, priorities, resolve, step_budget
from service.flags import ConfigError


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What a worker's role needs of its engine; by default, that of a worker that does all by itself.

    `decodes`: False where answers are not continued (prefill): decode steps are not recorded.
    `peers_write_pages`: True for decode: the host tier, which needs writes in stream order, is left out.
    `retracted_kv`: how a retracted request gets its KV again, as in --disaggregation-decode-retraction-backup.
    `reserve_floor`: tokens of growth that `Scheduler.reserve` expects of a request at least.
    """

    decodes: bool = True
    peers_write_pages: bool = False
    retracted_kv: str = "recompute"
    reserve_floor: int = 0


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A ready engine. `config` is resolved. `events`: what happens in the prefix cache, None if it is not published."""

    config: EngineConfig
    model: ModelConfig
    pool: KVPool
    device: Device
    scheduler: Scheduler
    depth: int
    weights: WeightUpdater
    disk: DiskPump
    events: CacheEvents | None


class LoadModel(Protocol):
    def __call__(
        self,
        model_path: str,
        config: ModelConfig,
        *,
        dtype: str,
        device: str,
        progress: bool,
        context_length: int | None,
    ) -> CausalLM: ...


def build_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    tail_texts: TailTexts,
    num_token_ids: int | None = None,
    use: EngineUse = EngineUse(),
    wakeup: Callable[[], None] = lambda: None,
    progress: bool,
    capture: MakeCapture | None = None,
    load: LoadModel = load_model,
) -> EngineParts:
    """Load the model and allocate its memory. Raises ConfigError for what cannot be honoured here.

    `num_token_ids`: ids that the tokenizer knows; a model may have rows beyond them, which mean nothing (None: all do).
    `wakeup` is called in a thread when files of the hierarchical cache have been read or written.
    `capture`: records decode graphs in place of CUDA. `load`: gives the model.
    """
    config = resolve(config, model_config, cuda=torch.cuda.is_available())
    assert config.num_threads is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    tiered = config.enable_hierarchical_cache and not use.peers_write_pages
    model, files = _load(load, config, model_config, fingerprinted=tiered, progress=progress)
    pool = allocate_pool(config, model.cache_specs())
    identity = _identities(config, model_config, pool)
    tier = build_host_tier(config, pool, identity(config.weight_version, files), wakeup=wakeup) if tiered else None
    capture = capture or (default_capture(config) if use.decodes else None)
    device = build_device(
        config,
        model_config,
        model,
        pool,
        host_pool=tier.pool if tier else None,
        capture=capture,
        tapes=use.decodes and capture is None,
        progress=progress,
    )
    events = _cache_events(config)
    memory = build_memory(config, num_pages=pool.num_pages, host=tier.cache if tier else None, events=events)
    num_ids = min(model_config.vocab_size, num_token_ids or model_config.vocab_size)
    return EngineParts(
        config=config,
        model=model_config,
        pool=pool,
        device=device,
        scheduler=build_scheduler(config, model_config, memory, use, tail_texts=tail_texts, num_token_ids=num_ids),
        depth=depth(config),
        weights=_weights(config, model_config, device, tier, identity),
        disk=tier.pump if tier else DiskPump(),
        events=events,
    )


def build_memory(config: EngineConfig, *, num_pages: int, host: HostCache | None, events: CacheEvents | None) -> Memory:
    allocator = PageAllocator(num_pages=num_pages, page_size=config.page_size)
    cache = RadixCache(allocator, enabled=not config.disable_radix_cache, below=host, listener=events)
    return Memory(allocator=allocator, cache=cache, host=host)


def build_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    memory: Memory,
    use: EngineUse,
    *,
    tail_texts: TailTexts,
    num_token_ids: int,
) -> Scheduler:
    state = SchedulerState(
        limits=limits(config),
        memory=memory,
        ratio=NewTokenRatio(conservativeness=config.schedule_conservativeness),
        growth=MeasuredGrowth(),
        backup_pages=memory.allocator.num_pages if use.retracted_kv == "host" else 0,  # the pool once more
    )
    settings = SchedulerSettings(
        policy=config.schedule_policy,
        priorities=priorities(config),
        reserve_floor=use.reserve_floor,
        resume_elsewhere=use.retracted_kv == "prefill",
        vocab_size=num_token_ids,
    )
    return Scheduler(
        state,
        settings=settings,
        tail_texts=tail_texts,
        uniform=random.Random(config.random_seed).random,
        step_budget=step_budget(config, model),
    )


def _load(
    load: LoadModel, config: EngineConfig, model: ModelConfig, *, fingerprinted: bool, progress: bool
) -> tuple[CausalLM, str]:
    """The model, and the fingerprint of the files it came from ("" if not `fingerprinted`)."""
    before = fingerprint(config.model_path) if fingerprinted else ""
    loaded = load(
        config.model_path,
        model,
        dtype=config.dtype,
        device=config.device,
        progress=progress,
        context_length=config.context_length,
    )
    if fingerprinted and fingerprint(config.model_path) != before:
        raise ConfigError(f"--model-path {config.model_path}: its files changed while they were read; start again")
    return loaded, before


def _cache_events(config: EngineConfig) -> CacheEvents | None:
    published = parse_kv_events_config(config.kv_events_config) is not None and not config.disable_radix_cache
    return CacheEvents(page_size=config.page_size) if published else None


def _identities(config: EngineConfig, model: ModelConfig, pool: KVPool) -> Callable[[str, str], KVIdentity]:
    """Names KV by the weights' version and the fingerprint of their files."""
    return lambda version, files: kv_identity(pool, model, dtype=config.dtype, version=version, fingerprint=files)


def _weights(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    tier: HostTier | None,
    identity: Callable[[str, str], KVIdentity],
) -> WeightUpdater:
    return WeightUpdater(
        config=config,
        model=model,
        install=lambda other: device.executor.call(lambda: device.runner.use(other)),
        taken=None if tier is None else lambda version, files: tier.cache.use_identity(identity(version, files)),
    )
