"""Puts an engine together: the model and its device, the core, the host tier."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

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
from engine.core.scheduler import Scheduler
from engine.core.state import SchedulerState
from engine.core.state_slots import StateSlots
from engine.core.window_pages import WindowPages
from engine.device import Device, build_device
from engine.executor.compile_log import CompileLog
from engine.executor.cuda_gauge import CudaGauge
from engine.executor.executor import Executor
from engine.executor.model_runner import DeviceOutOfMemory
from engine.executor.warm_up import StepExecutor, by_executor
from engine.executor.weights import WeightUpdater
from engine.expert_flags import expert_plan
from engine.gpu_memory import GpuMemory, MemoryGauge, await_share
from engine.graphs import MakeCapture
from engine.hicache.build import HostTier, build_host_tier
from engine.hicache.disk import Disk
from engine.kernels.linear import linear_kernel
from engine.kv.held import HeldKV
from engine.kv.host_memory import available_bytes, own_bytes
from engine.kv.host_pool import HostPool
from engine.kv.identity import fingerprint, kv_identity
from engine.kv.kv_pool import AllocateBytes, CacheSpec, KVPool, zeroed_bytes
from engine.kv.page_backup import PageBackup
from engine.kv.pool_memory import MappedMemory, SavedMemory
from engine.kv.state_pool import StatePool
from engine.kv_events_config import parse_kv_events_config
from engine.local_defaults import usable_cores
from engine.loop.occupation import FixedKV, KVMemory
from engine.lora.store import LoraStore
from engine.measure import measure, own_steps, warm
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.parallel.layout import ALONE
from engine.pool import allocate_pool, count_pages, free_bytes, held_by, note_memory
from engine.ranks.future_maps import future_map_of
from engine.ranks.group import Group, GroupAdapters, GroupKVMemory, GroupWeights
from engine.ranks.group_files import rank_files
from engine.ranks.leading_executor import LeadingExecutor
from engine.ranks.links import stage_input
from engine.ranks.messages import PoolSize
from engine.ranks.same_kernels import check_same_kernels, kernels_here
from engine.recurrent import check_recurrent, cut_on_grid, make_state_slots
from engine.resolve import (
    backup_pages,
    depth,
    limits,
    priorities,
    ratio_rule,
    resolve,
    state_slots,
    step_budget,
    with_state_slots,
)
from engine.windows import window_group
from service.flags import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What a worker's role needs of its engine; the defaults are those of a unified worker.

    `decodes`, `prefills`: whether such steps are recorded. `peers_write_pages`: there is no host tier, which needs writes in stream
    order. `kv_stays`: why KV memory cannot be released. `retracted_kv`: as --disaggregation-decode-retraction-backup. `reserve_floor`: as in Limits. `allocate_kv`: memory for the
    KV pool, as `zeroed_bytes`. `one_pool`: what reads pages knows one pool alone.
    """

    decodes: bool = True
    prefills: bool = True
    peers_write_pages: bool = False
    kv_stays: str = ""
    retracted_kv: str = "recompute"
    reserve_floor: int = 0
    allocate_kv: AllocateBytes = zeroed_bytes
    one_pool: bool = False


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A ready engine. `config` is resolved. `disk`: None without files. `events`: of the prefix cache; None: they are not published.

    `executor`, `adapters`: of all ranks (`adapters` None: without --enable-lora); `device` is the leader's own rank.
    `held`: what of the model's KV that has. `kv`: of all ranks, in stream order. `memory`: of the GPU, where --mem-fraction-static shares it
    out. `compiles`: of a GPU; its `serve` comes when the worker is ready.
    """

    config: EngineConfig
    model: ModelConfig
    pool: KVPool
    kv: KVMemory
    device: Device
    executor: Executor | LeadingExecutor
    adapters: LoraStore | GroupAdapters | None
    group: Group | None
    held: HeldKV
    scheduler: Scheduler
    depth: int
    weights: WeightUpdater
    disk: Disk | None
    events: CacheEvents | None
    memory: GpuMemory | None
    compiles: CompileLog | None


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
    gauge: MemoryGauge | None = None,
    load: Callable[..., DenseDecoder] = load_model,
    group: Group | None = None,
) -> EngineParts:
    """Load the model and allocate its memory. Raises ConfigError.

    `group`: of a leader, whose followers build their parts at the same time (engine/ranks/build.py).
    `num_token_ids`: ids that the tokenizer knows; a model may have meaningless rows beyond them. None: all have a meaning.
    `wakeup` is called in a thread when files of the hierarchical cache have been read or written.
    `capture`: records decode graphs in place of CUDA. `gauge`: measures memory in place of CUDA; on a CPU nothing does.
    """
    config = resolve(config, model_config, cuda=torch.cuda.is_available())
    assert config.num_threads is not None and config.mem_fraction_static is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    _check_sums(config)
    _check_integers(config)
    stored, model_config = model_config, model_config.quantized(config.quantization)
    tiered = config.enable_hierarchical_cache and not use.peers_write_pages
    compiles = CompileLog() if config.device == "cuda" and find_spec("triton") else None
    if gauge is None and config.device == "cuda":
        gauge = CudaGauge(torch.device("cuda"))
    shares = gauge is not None and config.max_total_tokens is None
    if gauge is not None and shares:
        await_share(gauge, config.mem_fraction_static)
    load_here = partial(
        load,
        dtype=config.dtype,
        device=config.device,
        context_length=config.context_length,
        quantization=config.quantization,
        **_share(config, model_config, group),
    )
    fingerprinted = tiered or group is not None
    before = own_bytes()
    model, files = _load(config, model_config, load_here, fingerprinted=fingerprinted, progress=progress)
    weights = own_bytes() - before
    recurrent = bool(model.state_specs())
    slots_bytes = 0
    if recurrent:
        check_recurrent(config, retracted_kv=use.retracted_kv)
        slot_bytes = StatePool.slot_bytes_of(model.state_specs())
        config = with_state_slots(config, slot_bytes=slot_bytes, free_bytes=free_bytes(), sharers=config.ranks_here)
        slots_bytes = (1 + state_slots(config)) * slot_bytes
    place = group.links.place if group else ALONE
    memory = _measured(config, model_config, model, gauge, use, group, progress=progress) if gauge and shares else None
    held = held_by(config, model_config, place)
    units, specs = len(held.units), model.cache_specs()
    pages = _count_pages(config, specs, memory, group, units=units, files=files, beside=slots_bytes)
    in_window = None
    if _windows_apart(config, specs, use, recurrent=recurrent) and group is None and not tiered:
        in_window = window_group(config, specs, pages=pages, units=units)
    if in_window is not None:
        pages = in_window.num_pages
        specs = [spec for spec in specs if not spec.window]
    saver = SavedMemory() if config.enable_memory_saver and config.device == "cuda" else None
    allocate = saver.allocate if saver else use.allocate_kv
    pool = allocate_pool(config, specs, num_pages=pages, units=units, allocate=allocate)
    windows = None
    if in_window is not None:
        inside = [spec for spec in model.cache_specs() if spec.window]
        windows = allocate_pool(config, inside, num_pages=in_window.window_pages, units=units, allocate=allocate)
    identity = partial(
        kv_identity,
        pool,
        model_config,
        dtype=config.dtype,
        held=held,
        tp_size=config.tp_size,
        reduce_units=config.reduce_units,
        whole_experts=config.ep_size > 1,
    )
    own_identity = identity(version=config.weight_version, fingerprint=files)
    sharers = config.ranks_here
    ranks = rank_files(config, model_config, specs, group.followers) if group else None
    tier = build_host_tier(config, pool, own_identity, wakeup=wakeup, sharers=sharers, ranks=ranks) if tiered else None
    backup = _page_backup(config, pool, group) if use.retracted_kv == "host" else None
    if group is not None:
        host_pages, backup_pages = tier.pool.num_pages if tier else 0, backup.host.num_pages if backup else 0
        slots = state_slots(config) if recurrent else 0
        group.followers.place(PoolSize(pages, host_pages, backup_pages, tier.files if tier else "", slots))
    device = build_device(
        config,
        model_config,
        model,
        pool,
        host_pool=tier.pool if tier else None,
        backup=backup,
        capture=capture,
        decodes=use.decodes,
        prefills=use.prefills,
        progress=progress,
        place=place,
        windows=windows,
        **_rank_inputs(config, model_config, group),
    )
    executor = _leading(config, device, group, wakeup) if group else device.executor
    if group is not None:
        group.followers.await_serving(timeout_s=group.timeout_s)
        check_same_kernels(kernels_here(), group.followers.apply("kernels").wait())
    if gauge is not None:
        _warm(config, model_config, executor, use, positions=pool.num_pages * config.page_size, progress=progress)
    states = make_state_slots(config, keeps_snapshots=not use.peers_write_pages) if recurrent else None
    kv_memory, events = _memory(
        config,
        num_pages=pool.num_pages,
        host=tier.cache if tier else None,
        states=states,
        windows=None if in_window is None else in_window.make_pages(config.page_size),
    )
    if config.device == "cpu":
        hosts = [*([tier.pool] if tier else []), *([backup.host] if backup else [])]
        note_memory(
            config,
            [pool, *([windows] if windows else [])],
            weights=weights,
            states=slots_bytes,
            copies=sum(host.num_pages * pool.page_bytes for host in hosts),
        )
    num_ids = min(model_config.vocab_size, num_token_ids or model_config.vocab_size)
    return EngineParts(
        config=config,
        model=model_config,
        pool=pool,
        kv=_kv_memory(config, use, device, [pool, *([windows] if windows else [])], saver, group),
        device=device,
        executor=executor,
        adapters=GroupAdapters(device.adapters, group.followers) if group and device.adapters else device.adapters,
        group=group,
        held=held,
        scheduler=_scheduler(
            config,
            model_config,
            kv_memory,
            use,
            backup_pages=backup.host.num_pages if backup else 0,
            tail_texts=tail_texts,
            num_token_ids=num_ids,
        ),
        depth=depth(config),
        weights=_weights(config, stored, device, group, load=load_here, tier=tier, identity=identity),
        disk=tier.disk if tier else None,
        events=events,
        memory=memory,
        compiles=compiles,
    )


def _measured(
    config: EngineConfig,
    model_config: ModelConfig,
    model: DenseDecoder,
    gauge: MemoryGauge,
    use: EngineUse,
    group: Group | None,
    *,
    progress: bool,
) -> GpuMemory:
    """Raises ConfigError."""
    if group is not None:
        group.followers.await_loaded(timeout_s=group.timeout_s)
    place = group.links.place if group else ALONE
    inputs = _rank_inputs(config, model_config, group)
    return measure(
        config,
        model_config,
        model,
        gauge,
        decodes=use.decodes,
        prefills=use.prefills,
        progress=progress,
        steps_over=partial(own_steps, config, model_config, model, progress=progress, place=place, **inputs),
        place=place,
    )


def _rank_inputs(config: EngineConfig, model: ModelConfig, group: Group | None) -> dict[str, Any]:
    """What a leader's steps read of other ranks, as `build_device` takes it."""
    if group is None:
        return {}
    assert config.max_running_requests is not None, "resolved"
    device, slots = torch.device(config.device), config.max_running_requests
    return {
        "exchange": group.links.exchange,
        "future_map": future_map_of(group.links, leads=True, device=device, num_slots=slots),
        "inputs": stage_input(group.links, config, model),
    }


def _kv_memory(
    config: EngineConfig,
    use: EngineUse,
    device: Device,
    pools: Sequence[KVPool],
    saver: SavedMemory | None,
    group: Group | None,
) -> KVMemory:
    if use.kv_stays:
        return FixedKV(f"{use.kv_stays}; name the tag weights alone")
    if config.device != "cpu":
        return saver or FixedKV("on a GPU KV memory is released by workers that start with --enable-memory-saver")
    buffers = [*(pool.buffer for pool in pools), *([] if device.states is None else [device.states.buffer])]
    own = MappedMemory(buffers, touched=config.prefault_kv)
    return own if group is None else GroupKVMemory(own, group.followers)


def _weights(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    group: Group | None,
    *,
    load: Callable[..., DenseDecoder],
    tier: HostTier | None,
    identity: Callable[..., KVIdentity],
) -> WeightUpdater:
    def rename_pages(version: str, files: str) -> None:
        if tier is not None:
            tier.cache.use_identity(identity(version=version, fingerprint=files))

    def install(other: DenseDecoder) -> None:
        device.executor.call(lambda: device.executor.runner.use(other, needs_graphs=group is not None))

    def drop() -> None:
        device.executor.call(device.executor.runner.drop)

    everywhere = None if group is None else GroupWeights(group.followers, load=load, install=install)
    return WeightUpdater(
        model_path=config.model_path,
        version=config.weight_version,
        model=model,
        load=load if everywhere is None else everywhere.load,
        on_cuda=config.device == "cuda",
        install=install if everywhere is None else everywhere.install,
        drop=drop if everywhere is None else partial(everywhere.drop, drop),
        taken=rename_pages,
        discard=everywhere.discard if everywhere else lambda: None,
    )


def _warm(
    config: EngineConfig, model: ModelConfig, executor: StepExecutor, use: EngineUse, *, positions: int, progress: bool
) -> None:
    """The measured steps again, on what serves: by its graphs, and with its page table. Raises ConfigError."""
    assert config.context_length is not None, "resolved"
    positions = min(positions, config.context_length)
    try:
        warm(config, model, by_executor(executor), positions=positions, decodes=use.decodes, progress=progress)
    except DeviceOutOfMemory as error:
        raise ConfigError(
            f"--mem-fraction-static: no memory is left for the largest step beside the KV cache ({error}); lower it or "
            "--max-total-tokens"
        ) from None


def _load(
    config: EngineConfig,
    model_config: ModelConfig,
    load: Callable[..., DenseDecoder],
    *,
    fingerprinted: bool,
    progress: bool,
) -> tuple[DenseDecoder, str]:
    """Return the model, and the fingerprint of its files ("" if it is not `fingerprinted`). Raises ConfigError."""
    path = config.model_path
    files = fingerprint(path) if fingerprinted else ""
    try:
        model = load(path, model_config, progress=progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--model-path {path}: the GPU has no memory for its weights ({error})") from None
    if fingerprinted and fingerprint(path) != files:
        raise ConfigError(f"--model-path {path}: its files changed while they were read; start again")
    return model, files


def _windows_apart(config: EngineConfig, specs: Sequence[CacheSpec], use: EngineUse, *, recurrent: bool) -> bool:
    """Whether nothing is on that knows one pool alone: then all KV is kept, and windows only mask it."""
    wanted = not (config.disable_hybrid_swa_memory or use.one_pool or use.retracted_kv == "host")
    plain = not recurrent and not any(spec.latent for spec in specs)
    return wanted and plain and config.device == "cpu" and config.attention_backend in ("auto", "cpu", "torch")


def _memory(
    config: EngineConfig,
    *,
    num_pages: int,
    host: HostCache | None,
    states: StateSlots | None,
    windows: WindowPages | None,
) -> tuple[Memory, CacheEvents | None]:
    published = parse_kv_events_config(config.kv_events_config) is not None and not config.disable_radix_cache
    events = CacheEvents(page_size=config.page_size) if published else None
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
    return Memory(
        allocator=allocator, cache=cache, host=host, states=states, windows=windows, rank=priorities(config).rank
    ), events


def _leading(config: EngineConfig, device: Device, group: Group, wakeup: Callable[[], None]) -> LeadingExecutor:
    return LeadingExecutor(device.executor, group.followers, attention=wakeup if config.watches_steps else None)


def _check_sums(config: EngineConfig) -> None:
    """Raises ConfigError where --reduce-units cannot give what it is for: equal bits for every --tp-size."""
    if not config.reduce_units or config.device != "cpu":
        return
    if config.dtype != "bfloat16":
        raise ConfigError(
            f"--reduce-units {config.reduce_units}: only bf16 products have the same bits on any number of ranks; give "
            f"--dtype bfloat16 in place of {config.dtype}, or leave it out"
        )
    if linear_kernel() is None:
        raise ConfigError(
            f"--reduce-units {config.reduce_units}: needs the C kernel of bf16 products, which this machine cannot build or "
            "whose arithmetic (AVX512-BF16) its CPU lacks; leave it out"
        )


def _check_integers(config: EngineConfig) -> None:
    """Raises ConfigError where --quantization would give the same answers at bf16's cost."""
    if config.quantization and linear_kernel() is None:
        raise ConfigError(
            f"--quantization {config.quantization}: needs the C kernel of integer products, which this machine cannot build or "
            "whose arithmetic (AVX512-BF16) its CPU lacks; leave it out"
        )


def _share(config: EngineConfig, model: ModelConfig, group: Group | None) -> dict[str, Any]:
    """What `load_model` needs to know of ranks."""
    if group is None:
        return {"reduce_units": config.reduce_units} if config.reduce_units else {}
    return {
        "place": group.links.place,
        "collectives": group.links.collectives,
        "exchange": group.links.exchange,
        "reduce_units": config.reduce_units,
        "experts": expert_plan(config, model),
    }


def _count_pages(
    config: EngineConfig,
    specs: Sequence[CacheSpec],
    memory: GpuMemory | None,
    group: Group | None,
    *,
    units: int,
    files: str,
    beside: int,
) -> int:
    """Count the KV pages: of all ranks, the least that one holds. Raises ConfigError."""
    if group is None:
        return count_pages(config, specs, memory, units=units, beside=beside)
    pages = count_pages(config, specs, memory, units=units, sharers=config.ranks_here, beside=beside)
    return min(pages, group.followers.await_ready(fingerprint=files, timeout_s=group.timeout_s))


def _page_backup(config: EngineConfig, pool: KVPool, group: Group | None) -> PageBackup | None:
    """Make room for copies of retracted requests; None: there is none, so they are computed again. Raises ConfigError."""
    free_bytes = available_bytes() // config.ranks_here
    pages = backup_pages(config, num_pages=pool.num_pages, page_bytes=pool.page_bytes, free_bytes=free_bytes)
    if pages == 0:
        log.warning("retracted requests are computed again: half of the free host memory does not hold one KV page")
        return None
    try:
        return PageBackup(HostPool(pool, num_pages=pages, threads=usable_cores()))
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--disaggregation-decode-retraction-backup host: no host memory for {pages * pool.page_bytes / 1e9:.1f} GB "
            f"({error}); use recompute or prefill"
        ) from error


def _scheduler(
    config: EngineConfig,
    model: ModelConfig,
    memory: Memory,
    use: EngineUse,
    *,
    backup_pages: int,
    tail_texts: TailTexts,
    num_token_ids: int,
) -> Scheduler:
    own_limits = limits(config) if memory.states is None else cut_on_grid(limits(config), memory.states.grid)
    state = SchedulerState(
        limits=replace(
            own_limits,
            reserve_floor=use.reserve_floor,
            resume_elsewhere=use.retracted_kv == "prefill",
            vocab_size=num_token_ids,
        ),
        memory=memory,
        ratio=NewTokenRatio(ratio_rule(config)),
        growth=MeasuredGrowth(),
        backup_pages=backup_pages,
    )
    return Scheduler(
        state,
        tail_texts=tail_texts,
        uniform=random.Random(config.random_seed).random,
        step_budget=step_budget(config, model, part_tokens=own_limits.part_tokens),
    )
