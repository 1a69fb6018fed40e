"""Builds a follower: its part of the weights, its KV pool, and its part of each step."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.device.device import adapter_store
from engine.device.forward_parts import ForwardParts
from engine.device.kv_memory import held_by, kept_specs
from engine.device.measure import MemoryGauge, await_share, measured
from engine.device.memory_plan import kv_pages, with_fitting_prompts, with_state_slots
from engine.device.pools import build_pools
from engine.device.step_memory import MakeCapture, Recording, StepMemory, memory_for_graphs
from engine.executor.profiler import TorchProfiler
from engine.executor.warm_up import CudaGauge
from engine.flags.images import cache_bytes
from engine.flags.rank_rules import check_device
from engine.flags.resolve import resolve, state_slots
from engine.flags.speculation import max_drafted, with_drafter
from engine.hicache.rank_files import FollowerFiles
from engine.kv.cache_spec import page_bytes_of
from engine.kv.host_memory import HERE, HostMemory
from engine.kv.host_pool import HostPool, allocate_host_pool
from engine.kv.kv_pool import fingerprint_of, kv_identity
from engine.kv.state_pool import StatePool
from engine.messages import StartProfile
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.models.decoder import DenseDecoder
from engine.parallel.process_groups import RankGroups
from engine.parallel.region import SharedRegion
from engine.ranks.follower import Action, Follower, Reader
from engine.ranks.links import Joint, RankLinks, links_of, loader
from engine.ranks.messages import NO_LIMIT, Channel, Loaded, PoolSize, Ready, Serving, ToFollower
from engine.ranks.rank_checksum import RankChecksum, Tail
from engine.ranks.rank_parts import RankPools, RankUse, kernels_here, rank_parts, steps_of_rank
from service.flags import ConfigError


def build_follower(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    region: SharedRegion,
    rank: int,
    channel: Channel[ToFollower],
    use: RankUse,
    turning: Callable[[bool], None],
    wires: Mapping[str, socket.socket] | None = None,
    joint: Joint | None = None,
    groups: RankGroups | None = None,
    capture: MakeCapture | None = None,
    gauge: MemoryGauge | None = None,
    host: HostMemory = HERE,
) -> tuple[Follower, RankPools]:
    """Build a rank in step with its leader. Raises ConfigError; ChannelClosed if it ends.

    `wires`, `joint`, `groups`: as in `links_of`. `capture`, `gauge`, `host`: as in `build_engine`.
    On a GPU all later work of the calling thread is enqueued in one stream.
    """
    given, config = config, resolve(config, model_config, cuda=torch.cuda.is_available())
    check_device(config)
    model_config = with_drafter(config, model_config.quantized(config.quantization))
    assert config.num_threads is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    if gauge is None and config.device == "cuda":
        gauge = CudaGauge(torch.device("cuda"))
    shares = gauge is not None and config.max_total_tokens is None
    if gauge is not None and shares:
        assert config.mem_fraction_static is not None, "resolved"
        await_share(gauge, config.mem_fraction_static)
    links = links_of(region, rank, config, wires, joint=joint, groups=groups)
    load = _load(config, model_config, links)
    before, free = host.own(), host.available() // (config.dp_size * config.ranks_here)
    model = load(config.model_path, model_config)
    weights = max(0, host.own() - before)
    if config.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    held, specs = held_by(config, model_config, links.place), kept_specs(config, model.cache_specs())
    if config.max_total_tokens is None:
        channel.send(Loaded())
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
        progress=False,
        steps_over=partial(steps_of_rank, config, model_config, model, links),
        place=links.place,
    )
    recurrent = bool(model.state_specs())
    if found is not None:
        found = replace(found, features=cache_bytes(config) if model.vision is not None else 0)
        config, found = with_fitting_prompts(given, config, found, recurrent=recurrent)
    units = len(held.units)
    page_bytes = page_bytes_of(specs, config.page_size, units=units)
    states_bytes, slots, shadows = 0, NO_LIMIT, NO_LIMIT
    if recurrent:
        slot_bytes = StatePool.slot_bytes_of(model.state_specs())
        drafted = max_drafted(config, decodes=use.decodes)
        sized, shadows = with_state_slots(given, config, found, slot_bytes=slot_bytes, drafted=drafted)
        slots = state_slots(sized)
        states_bytes = (1 + slots + shadows) * slot_bytes
    pages = kv_pages(given, config, found, page_bytes=page_bytes, states=states_bytes)
    assert config.chunked_prefill_size is not None and config.max_prefill_tokens is not None, "resolved"
    files, batch = fingerprint_of(config), config.max_prefill_tokens
    channel.send(Ready(pages, files, slots, shadows, config.chunked_prefill_size, batch))
    agreed = channel.receive()
    assert isinstance(agreed, PoolSize), agreed
    config, allocate = replace(config, chunked_prefill_size=agreed.chunked_prefill_size), use.allocate_kv
    pools = build_pools(config, specs, num_pages=agreed.num_pages, units=units, apart=agreed.apart, allocate=allocate)
    pool = pools.kv
    host_pool = None
    if agreed.host_pages:
        flag = "--enable-hierarchical-cache"
        host_pool = allocate_host_pool(pool, agreed.host_pages, flag=flag, remedy="leave it out")
    sized = replace(config, max_mamba_cache_size=agreed.state_slots or None)
    runner, parts = rank_parts(
        sized,
        model_config,
        model,
        links,
        Recording(decodes=use.decodes, prefills=use.prefills, capture=capture),
        StepMemory(
            pool=pool,
            windows=pools.windows,
            shadows=agreed.shadow_slots,
            host_pool=host_pool,
            backup_room=agreed.backup_room,
        ),
    )
    with memory_for_graphs():
        runner.running.record()
    readers: dict[str, Reader] = {"weights": lambda path: load(path, load_model_config(path))}
    states = None if parts.states is None else parts.states.pool
    kv_memory = pools.memory(config, states)
    actions: dict[str, Action] = {
        "use_weights": runner.running.use,
        "drop_weights": runner.running.drop,
        "release_kv": kv_memory.release,
        "resume_kv": kv_memory.resume,
        "forget": lambda _: None,
        "answer": lambda: None,
        "kernels": kernels_here,
    }
    _add_adapters(config, model, parts, readers, actions)
    _add_profiles(TorchProfiler(_now, name=use.name), actions)
    if agreed.files and host_pool is not None:
        _add_files(
            Path(agreed.files) / f"rank{rank}",
            host_pool,
            kv_identity(
                pool,
                model_config,
                dtype=config.dtype,
                version="",
                fingerprint="",
                held=held,
                tp_size=config.tp_size,
                reduce_units=config.reduce_units,
                whole_experts=config.ep_size > 1,
            ),
            actions,
        )
    own = RankPools(kv=pool, held=held, states=states, windows=pools.windows)
    _add_checksum(own, actions)
    channel.send(Serving())
    follower = Follower(channel, runner, readers=readers, actions=actions, turning=turning)
    return follower, own


def _load(config: EngineConfig, model: ModelConfig, links: RankLinks) -> Callable[[str, ModelConfig], DenseDecoder]:
    """Return what reads this rank's share of a checkpoint. It raises ConfigError."""
    read = loader(config, model, links)

    def load(path: str, found: ModelConfig) -> DenseDecoder:
        try:
            share = read(path, found, progress=False)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"{path}: the GPU has no memory for this rank's share of its weights ({error})") from None
        if config.device == "cuda":
            torch.cuda.synchronize()  # the copies were enqueued on this thread's stream
        return share

    return load


def _add_adapters(
    config: EngineConfig,
    model: DenseDecoder,
    parts: ForwardParts,
    readers: dict[str, Reader],
    actions: dict[str, Action],
) -> None:
    if parts.adapters is None:
        return
    store = adapter_store(config, model, parts.adapters, in_order=_now)
    readers["adapter"] = store.read
    actions["add_adapter"] = lambda weights, adapter: store.install(adapter, weights)
    actions["remove_adapter"] = lambda adapter: store.remove(adapter)


def _add_checksum(pools: RankPools, actions: dict[str, Action]) -> None:
    landed = threading.Event()
    checksum = RankChecksum(pools, wakeup=landed.set)

    def value_of(pages: Sequence[int], tail: Tail, num_tokens: int | None) -> Mapping[str, int]:
        value = checksum(pages, tail, num_tokens)
        while (found := value()) is None:
            landed.wait()
            landed.clear()
        return found

    actions["checksum"] = value_of


def _add_profiles(profiler: TorchProfiler, actions: dict[str, Action]) -> None:
    actions["start_profile"] = lambda asked: profiler.start(msgspec.convert(asked, StartProfile))
    actions["stop_profile"] = profiler.stop


def _add_files(folder: Path, host_pool: HostPool, identity: KVIdentity, actions: dict[str, Action]) -> None:
    files = FollowerFiles(folder, page_of=host_pool.page, identity=identity)
    actions["read_page"], actions["write_page"] = files.read, files.write


def _now(work: Callable[[], object]) -> object:
    """A follower runs each message when it comes, behind all steps before it."""
    return work()
