"""Puts an engine together: the model and its device, the core, the host tier."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from engine.config import EngineConfig
from engine.core.mem_cache.backups import NOTHING
from engine.core.mem_cache.cache_events import PrefixEvents
from engine.core.scheduler import Scheduler
from engine.core_parts import UNIFIED, EngineUse, build_memory, build_scheduler
from engine.device.device import Device, build_device
from engine.device.feature_pool import arriving_pages, feature_page_bytes, feature_pool
from engine.device.host_copies import backup_bytes, backup_room
from engine.device.kv_memory import held_by, kept_specs, note_memory
from engine.device.lanes import build_lanes
from engine.device.machine import cpu_kind
from engine.device.measure import MemoryGauge, await_share, measured, own_steps, warm
from engine.device.memory_plan import (
    kv_pages,
    with_fitting_prompts,
    with_running_requests,
    with_state_slots,
)
from engine.device.pools import Pools, behind_windows, build_pools, why_kept
from engine.device.step_memory import MakeCapture, RankSeat, Recording, StepMemory
from engine.executor.executor import Executor
from engine.executor.model_runner import DeviceOutOfMemory
from engine.executor.warm_up import CompileLog, CudaGauge, by_executor
from engine.executor.weights import WeightUpdater
from engine.flags.images import cache_bytes, image_cache
from engine.flags.resolve import depth, resolve, state_slots
from engine.flags.speculation import max_drafted, with_drafter
from engine.hicache.build import build_host_tier
from engine.hicache.page_files import Disk
from engine.kernels.build import CpuKindError
from engine.kernels.linear import linear_kernel
from engine.kv.cache_spec import KVShard, page_bytes_of
from engine.kv.host_memory import HERE, HostMemory
from engine.kv.kv_pool import KVPool, kv_identity
from engine.kv.state_pool import StatePool
from engine.loading import load_at_start, weight_updater
from engine.loop.control import FixedKV, KVMemory
from engine.lora.bank import LoraStore
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.parallel.layout import ALONE, Place
from engine.ranks.group import Group, GroupAdapters, GroupKVMemory, rank_files
from engine.ranks.links import Load, future_map_of, loader, stage_input
from engine.ranks.messages import PoolSize, Ready
from engine.ranks.rank_parts import check_same_kernels, kernels_here
from engine.recurrent import check_recurrent, make_state_slots
from service.flags import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A ready engine.

    - config: resolved; device: the leader's own rank
    - executor, adapters, kv (in stream order): all ranks; adapters only with --enable-lora
    - held: that rank's part of the model's KV; layers_in_pages: layers with KV in `pool`, the
      others have windows in a pool of their own
    - disk: only with files of the host tier; events: only if the prefix cache is published
    - memory: bytes of the leader's rank by use
    - behind_windows: as `engine.device.pools.behind_windows`
    - compiles: GPU only; its `serve` is called when the worker is ready
    - arrivals: pool for image features of other workers, if there are any
    """

    config: EngineConfig
    model: ModelConfig
    pool: KVPool
    kv: KVMemory
    device: Device
    executor: Executor
    adapters: LoraStore | GroupAdapters | None
    group: Group | None
    held: KVShard
    scheduler: Scheduler
    depth: int
    weights: WeightUpdater[DenseDecoder]
    disk: Disk | None
    events: PrefixEvents | None
    memory: Mapping[str, int]
    layers_in_pages: Sequence[int]
    behind_windows: str | None
    compiles: CompileLog | None
    arrivals: KVPool | None = None


def build_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    use: EngineUse = UNIFIED,
    wakeup: Callable[[], None] = lambda: None,
    progress: bool,
    capture: MakeCapture | None = None,
    gauge: MemoryGauge | None = None,
    host: HostMemory = HERE,
    load: Load = load_model,
    group: Group | None = None,
) -> EngineParts:
    """Load the model and allocate its memory. Raises ConfigError.

    - group: of a leader; its followers build their parts at the same time (engine/ranks/build.py)
    - wakeup: called in a thread after reads and writes of host tier files
    - capture, gauge: record graphs and measure memory in place of CUDA
    - host: the machine's memory, shared by CPU engines
    """
    given, config = config, resolve(config, model_config, cuda=torch.cuda.is_available())
    assert config.num_threads is not None and config.mem_fraction_static is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    _name_kind(config)
    _check_sums(config)
    _check_integers(config)
    stored, model_config = model_config, with_drafter(config, model_config.quantized(config.quantization))
    tiered = config.enable_hierarchical_cache and not use.peers_write_pages
    compiles = CompileLog() if config.device == "cuda" and find_spec("triton") else None
    if gauge is None and config.device == "cuda":
        gauge = CudaGauge(torch.device("cuda"))
    shares = gauge is not None and config.max_total_tokens is None
    if gauge is not None and shares:
        await_share(gauge, config.mem_fraction_static)
    load_here = loader(config, model_config, group.links if group else None, load)
    fingerprinted = tiered or group is not None
    before, free = host.own(), host.available() // (config.dp_size * config.ranks_here)
    model, files = load_at_start(config, model_config, load_here, fingerprinted=fingerprinted, progress=progress)
    weights = max(0, host.own() - before)
    recurrent = bool(model.state_specs())
    if recurrent:
        check_recurrent(config)
    place = group.links.place if group else ALONE
    if group is not None and config.max_total_tokens is None:
        group.followers.await_loaded(timeout_s=group.timeout_s)
    seat = _seat(config, model_config, place, group)
    found = measured(
        config,
        model_config,
        model,
        gauge=gauge,
        host=host,
        free=free,
        weights=weights,
        decodes=use.decodes,
        prefills=use.prefills,
        progress=progress,
        steps_over=partial(own_steps, config, model_config, model, seat),
        place=place,
    )
    if found is not None:
        if config.enable_pdmux:
            found = found.at_once()
        arriving = _arriving_bytes(config, model_config, use)
        found = replace(found, features=cache_bytes(config) + arriving if model.vision is not None else 0)
        config, found = with_fitting_prompts(given, config, found, recurrent=recurrent)
    slot_bytes = slots = shadows = 0
    if recurrent:
        slot_bytes = StatePool.slot_bytes_of(model.state_specs())
        drafted = max_drafted(config, decodes=use.decodes)
        config, shadows = with_state_slots(given, config, found, slot_bytes=slot_bytes, drafted=drafted)
        slots = state_slots(config)
    slots_bytes = (1 + slots + shadows) * slot_bytes
    held = held_by(config, model_config, place)
    units, specs = len(held.units), kept_specs(config, model.cache_specs())
    page_bytes = page_bytes_of(specs, config.page_size, units=units)
    pages = kv_pages(given, config, found, page_bytes=page_bytes, states=slots_bytes)
    if group is not None:
        least = group.followers.await_ready(fingerprint=files, timeout_s=group.timeout_s)
        pages, config = min(pages, least.num_pages), _with_least(config, least)
        slots, shadows = state_slots(config) if recurrent else 0, min(shadows, least.shadow_slots)
        slots_bytes = (1 + slots + shadows) * slot_bytes
    kept = why_kept(config, specs, use, recurrent=recurrent)
    apart = not kept
    pools = build_pools(config, specs, num_pages=pages, units=units, apart=apart, allocate=use.allocate_kv)
    pool = pools.kv
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
    ranks = rank_files(config, model_config, specs, group.followers) if group else None
    tier = build_host_tier(config, pool, own_identity, wakeup=wakeup, host=host, ranks=ranks) if tiered else None
    room = NOTHING
    if use.retracted_kv == "host":
        free_bytes = host.available() // config.ranks_here
        room = backup_room(config, pools, slots=slots, slot_bytes=slot_bytes, free_bytes=free_bytes)
    if group is not None:
        assert config.chunked_prefill_size is not None, "resolved"
        agreed = PoolSize(
            num_pages=pages,
            host_pages=tier.pool.num_pages if tier else 0,
            backup_pages=room.pages,
            backup_windows=room.windows,
            backup_states=room.states,
            files=tier.files if tier else "",
            state_slots=slots,
            shadow_slots=shadows,
            apart=apart,
            chunked_prefill_size=config.chunked_prefill_size,
        )
        group.followers.place(agreed)
    arrivals = _arrivals(config, model_config, use)
    own = StepMemory(
        pool=pool,
        windows=pools.windows,
        shadows=shadows,
        arrivals=arrivals,
        host_pool=tier.pool if tier else None,
        backup_room=room,
    )
    records = Recording(decodes=use.decodes, prefills=use.prefills, capture=capture, progress=progress)
    make = partial(build_device, config, model_config, model, own, seat=_seat(config, model_config, place, group))
    device = build_lanes(make, config, records, attention=wakeup) if config.enable_pdmux else make(records=records)
    executor = _leading(config, device, group, wakeup) if group else device.executor
    if group is not None:
        group.followers.await_serving(timeout_s=group.timeout_s)
        check_same_kernels(kernels_here(), group.followers.apply("kernels").wait())
    if gauge is not None:
        _warm(config, model_config, executor, use, positions=pool.num_pages * config.page_size, progress=progress)
    config = with_running_requests(given, config, pages=pool.num_pages, slots=slots, windows=pools.num_windows)
    states = None
    if recurrent:
        peers_write = use.peers_write_pages or room != NOTHING
        states = make_state_slots(config, peers_write=peers_write, num_shadows=shadows)
    own_parts = (tier.cache if tier else None, states, pools.window_pages(), image_cache(config, model_config))
    kv_memory, events = build_memory(config, own_parts, num_pages=pool.num_pages)
    tier_bytes = tier.pool.num_pages * tier.pool.page_bytes if tier else 0
    memory = note_memory(
        config,
        found,
        {**pools.bytes_by_name(), "states": slots_bytes},
        copies=tier_bytes + backup_bytes(room, pools, slot_bytes=slot_bytes),
        tokens=pool.num_pages * config.page_size,
        shadows=shadows,
    )

    def rename_pages(version: str, files: str) -> None:
        if tier is not None:
            tier.cache.use_identity(identity(version=version, fingerprint=files))

    return EngineParts(
        config=config,
        model=model_config,
        pool=pool,
        kv=_kv_memory(config, use, pools, device, group),
        device=device,
        executor=executor,
        adapters=GroupAdapters(device.adapters, group.followers) if group and device.adapters else device.adapters,
        group=group,
        held=held,
        scheduler=build_scheduler(config, model_config, kv_memory, use, backup_room=room),
        depth=depth(config),
        weights=weight_updater(config, stored, device, group, load=load_here, rename_pages=rename_pages),
        disk=tier.disk if tier else None,
        events=events,
        memory=memory,
        layers_in_pages=[i for i, spec in enumerate(specs) if pools.windows is None or not spec.window],
        behind_windows=behind_windows(specs, kept),
        compiles=compiles,
        arrivals=arrivals,
    )


def _arriving_bytes(config: EngineConfig, model: ModelConfig, use: EngineUse) -> int:
    if not use.receives_features or model.vision is None:
        return 0
    return (1 + arriving_pages(config, model, model.vision)) * feature_page_bytes(config, model, model.vision)


def _arrivals(config: EngineConfig, model: ModelConfig, use: EngineUse) -> KVPool | None:
    """Where features of images arrive; None: nowhere. Raises ConfigError."""
    if not use.receives_features or model.vision is None:
        return None
    num_pages = arriving_pages(config, model, model.vision)
    return feature_pool(config, model, model.vision, num_pages=num_pages, allocate=use.allocate_kv)


def _with_least(config: EngineConfig, least: Ready) -> EngineConfig:
    """Let all ranks have what each has room for."""
    assert config.chunked_prefill_size is not None and config.max_prefill_tokens is not None, "resolved"
    slots = least.state_slots if least.state_slots < state_slots(config) else config.max_mamba_cache_size
    return replace(
        config,
        chunked_prefill_size=min(config.chunked_prefill_size, least.chunked_prefill_size),
        max_prefill_tokens=min(config.max_prefill_tokens, least.max_prefill_tokens),
        max_mamba_cache_size=slots,
    )


def _kv_memory(config: EngineConfig, use: EngineUse, pools: Pools, device: Device, group: Group | None) -> KVMemory:
    if use.kv_stays:
        return FixedKV(f"{use.kv_stays}; name the tag weights alone")
    own = pools.memory(config, device.states)
    return own if group is None else GroupKVMemory(own, group.followers)


def _seat(config: EngineConfig, model: ModelConfig, place: Place, group: Group | None) -> RankSeat:
    """Return what a leader's steps have of other ranks."""
    if group is None:
        return RankSeat(place=place)
    assert config.max_running_requests is not None, "resolved"
    device, slots = torch.device(config.device), config.max_running_requests
    return RankSeat(
        place=place,
        exchange=group.links.exchange,
        future_map=future_map_of(group.links, leads=True, device=device, num_slots=slots),
        inputs=stage_input(group.links, config, model),
    )


def _warm(
    config: EngineConfig, model: ModelConfig, executor: Executor, use: EngineUse, *, positions: int, progress: bool
) -> None:
    """Repeat the measured steps on the engine that serves, with its graphs. Raises ConfigError."""
    assert config.context_length is not None, "resolved"
    positions = min(positions, config.context_length)
    try:
        for stream in executor.streams if config.enable_pdmux else (executor,):
            warm(config, model, by_executor(stream), positions=positions, decodes=use.decodes, progress=progress)
    except DeviceOutOfMemory as error:
        raise ConfigError(
            f"--mem-fraction-static: no memory is left for the largest step beside the KV cache ({error}); lower it or "
            "--max-total-tokens"
        ) from None


def _leading(config: EngineConfig, device: Device, group: Group, wakeup: Callable[[], None]) -> Executor:
    attention = wakeup if config.watches_steps else None
    return Executor(device.executor.streams, ranks=group.followers, attention=attention)


def _name_kind(config: EngineConfig) -> None:
    """Raises ConfigError where the environment asks for arithmetic that this CPU lacks."""
    if config.device != "cpu":
        return
    try:
        log.info("CPU kernels: %s", cpu_kind(config.dtype))
    except CpuKindError as error:
        raise ConfigError(str(error)) from None


def _check_sums(config: EngineConfig) -> None:
    """Raises ConfigError if --reduce-units cannot give equal bits for every --tp-size."""
    if not config.reduce_units or config.device != "cpu":
        return
    if config.dtype != "bfloat16":
        raise ConfigError(
            f"--reduce-units {config.reduce_units}: only bf16 products have the same bits on any number of ranks; give "
            f"--dtype bfloat16 in place of {config.dtype}, or leave it out"
        )
    if linear_kernel() is None:
        raise ConfigError(
            f"--reduce-units {config.reduce_units}: needs the C kernel of bf16 products, which this machine cannot build (its "
            "log says why); install a C compiler, or leave it out"
        )


def _check_integers(config: EngineConfig) -> None:
    """Raises ConfigError where --quantization would give the same answers at bf16's cost."""
    if config.quantization and linear_kernel() is None:
        raise ConfigError(
            f"--quantization {config.quantization}: needs the C kernel of integer products, which this machine cannot build (its "
            "log says why); install a C compiler, or leave it out"
        )
