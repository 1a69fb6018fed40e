"""Builds a follower: its share of the weights, its KV pool, and what computes its part of each step."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.core.page_keys import KVIdentity
from engine.device import ForwardParts, adapter_store, build_forward
from engine.executor.copies import Copies
from engine.executor.profiler import TorchProfiler
from engine.hicache.rank_files import FollowerFiles
from engine.kernels.page_sums import page_sums_for
from engine.kv.held import HeldKV
from engine.kv.host_pool import HostPool
from engine.kv.identity import fingerprint, kv_identity
from engine.kv.kv_pool import AllocateBytes, KVPool
from engine.kv.page_backup import PageBackup
from engine.kv.page_checksum import PageChecksum
from engine.messages import StartProfile
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.parallel.layout import share_of
from engine.parallel.region import SharedRegion
from engine.pool import allocate_pool, count_pages, held_by
from engine.rank_rules import check_device
from engine.ranks.channel import Channel
from engine.ranks.follower import Action, Follower, Reader
from engine.ranks.future_maps import FollowerFutureMap
from engine.ranks.links import Joint, links_of
from engine.ranks.messages import PoolSize, Ready, Serving, ToFollower
from engine.ranks.rank_runner import RankRunner
from engine.ranks.same_kernels import kernels_here
from engine.ranks.stages import StageInput
from engine.resolve import resolve
from service.flags import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """What a follower's worker needs of it. `decodes`: decode steps are recorded. `name`: of the rank, in files."""

    decodes: bool
    name: str
    allocate_kv: AllocateBytes


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
) -> tuple[Follower, KVPool, HeldKV]:
    """Build rank `rank` in step with its leader (`build_engine`). `wires`, `joint`: as `links_of` takes them. Raises ConfigError, and ChannelClosed where the leader ends."""
    config = resolve(config, model_config, cuda=torch.cuda.is_available())
    check_device(config)
    assert config.num_threads is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    links = links_of(region, rank, config, wires, joint=joint)
    load = partial(
        load_model,
        dtype=config.dtype,
        device=config.device,
        progress=False,
        context_length=config.context_length,
        place=links.place,
        collectives=links.collectives,
        exchange=links.exchange,
        reduce_units=config.reduce_units,
    )
    model = load(config.model_path, model_config)
    held, specs = held_by(config, model_config, links.place), model.cache_specs()
    units = len(held.units)
    pages = count_pages(config, specs, None, units=units, sharers=config.ranks_here)
    channel.send(Ready(pages, fingerprint(config.model_path)))
    agreed = channel.receive()
    assert isinstance(agreed, PoolSize), agreed
    pool = allocate_pool(config, specs, num_pages=agreed.num_pages, units=units, allocate=use.allocate_kv)
    parts = build_forward(
        config,
        model,
        pool,
        num_heads=len(share_of(model_config, links.place).heads),
        tapes=use.decodes,
        exchange=links.exchange,
    )
    future_map = FollowerFutureMap(links.tokens)
    inputs = future_map if links.before is None else StageInput(links.before)
    backup = _host_pool(pool, agreed.backup_pages, flag="--disaggregation-decode-retraction-backup host")
    host_pool = _host_pool(pool, agreed.host_pages, flag="--enable-hierarchical-cache")
    runner = RankRunner(
        model=model,
        copies=Copies(backup=None if backup is None else PageBackup(backup), host_pool=host_pool),
        forward_pass=parts.forward_pass(inputs),
        future_map=future_map,
        after=links.after,
    )
    readers: dict[str, Reader] = {"weights": lambda path: load(path, load_model_config(path))}
    actions: dict[str, Action] = {
        "use_weights": runner.use,
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
            ),
            actions,
        )
    checksum = PageChecksum(pool, held=held, page_sums=page_sums_for(pool.device))
    actions["checksum"] = lambda pages: checksum(pages)()
    channel.send(Serving())
    return Follower(channel, runner, readers=readers, actions=actions, turning=turning), pool, held


def _host_pool(pool: KVPool, num_pages: int, *, flag: str) -> HostPool | None:
    if num_pages == 0:
        return None
    try:
        return HostPool(pool, num_pages=num_pages)
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        size = num_pages * pool.page_bytes / 1e9
        raise ConfigError(f"{flag}: no host memory for {size:.1f} GB of this rank ({error}); leave it out") from error


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


def _add_profiles(profiler: TorchProfiler, actions: dict[str, Action]) -> None:
    actions["start_profile"] = lambda asked: profiler.start(msgspec.convert(asked, StartProfile))
    actions["stop_profile"] = profiler.stop


def _add_files(folder: Path, host_pool: HostPool, identity: KVIdentity, actions: dict[str, Action]) -> None:
    files = FollowerFiles(folder, page_of=host_pool.page, identity=identity)
    actions["read_page"], actions["write_page"] = files.read, files.write


def _now(work: Callable[[], object]) -> object:
    """A follower runs each message when it comes, behind all steps before it."""
    return work()
