"""Assembly of a follower in step with its leader: model, pools, and work besides steps."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch

from engine.assembly.loading import load_rank, over_running, resolved, share_loader, trainer_calls
from engine.assembly.memory import MemorySizes, fitting_sizes
from engine.config import EngineConfig
from engine.device.device import adapter_store
from engine.device.forward_parts import ForwardParts
from engine.device.step_memory import (
    THIS_MACHINE,
    EngineUse,
    LoadedRank,
    LocalMachine,
    Recording,
    StepMemory,
    memory_for_graphs,
)
from engine.executor.profiler import TorchProfiler
from engine.flags.nodes import check_nodes
from engine.hicache.build import follower_files, tier_memory
from engine.hicache.rank_files import FollowerFiles
from engine.loop.control import KVMemory
from engine.messages import StartProfile
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.ranks.follower import Action, Follower, RankRunner, Reader
from engine.ranks.links import RankLinks, loader
from engine.ranks.messages import Channel, Loaded, PoolSize, Serving, ToFollower
from engine.ranks.rank_checksum import RankChecksum, Tail
from engine.ranks.rank_parts import RankPools, kernels_here, rank_parts, steps_of_rank

Connect = Callable[[EngineConfig], RankLinks]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRank:
    """A follower's steps and memory. `files`: its parts of page files, if there are any."""

    runner: RankRunner
    parts: ForwardParts
    pools: RankPools
    kv: KVMemory
    files: FollowerFiles | None


def build_follower(
    given: EngineConfig,
    stored: ModelConfig,
    channel: Channel[ToFollower],
    *,
    connect: Connect,
    use: EngineUse,
    turning: Callable[[bool], None],
    machine: LocalMachine = THIS_MACHINE,
) -> tuple[Follower, RankPools]:
    """Build the rank that `connect` joins to the others, in step with its leader (`build_engine`).

    Raises ConfigError, and ChannelClosed where the leader ends. On a GPU all later work of the
    calling thread runs in one stream.
    """
    config, model = resolved(given, stored, check_nodes)
    links = connect(config)
    load = share_loader(config, loader(config, model, links, machine.load))
    rank = load_rank(config, model, machine, load, fingerprinted=True)
    if config.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    if config.max_total_tokens is None:
        channel.send(Loaded())
    use = replace(use, receives_features=False)  # the leader receives them
    steps_over = partial(steps_of_rank, config, model, rank.model, links)
    sizes = fitting_sizes(rank, given, use, links.place, steps_over)
    channel.send(sizes.ready(rank.files))
    agreed = channel.receive()
    assert isinstance(agreed, PoolSize), agreed
    built = _build(rank, sizes.placed(agreed), agreed, links, use)
    joins, leaves = trainer_calls(config, rank=links.place.rank)
    new = over_running(load, built.runner.running)
    readers: dict[str, Reader] = {
        "weights": lambda path, **more: new(path, load_model_config(path), progress=False, **more),
        **joins,
    }
    actions: dict[str, Action] = {
        **_actions(built, TorchProfiler(_now, name=use.name)),
        **leaves,
    }
    if built.parts.adapters is not None:
        store = adapter_store(config, rank.model, built.parts.adapters, in_order=_now)
        readers["adapter"] = store.read
        actions["add_adapter"] = lambda weights, adapter: store.install(adapter, weights)
        actions["remove_adapter"] = lambda adapter: store.remove(adapter)
    channel.send(Serving())
    return Follower(channel, built.runner, readers=readers, actions=actions, turning=turning), built.pools


def _build(rank: LoadedRank, sizes: MemorySizes, agreed: PoolSize, links: RankLinks, use: EngineUse) -> BuiltRank:
    """Raises ConfigError."""
    machine = rank.machine
    pools, host, files = sizes.pools(use, apart=agreed.apart), None, None
    if agreed.host_pages:
        host = tier_memory(
            pools.kv,
            pages=agreed.host_pages,
            states=agreed.host_states,
            slot_bytes=sizes.slot_bytes,
            flag="--enable-hierarchical-cache",
            remedy="leave it out",
        )
        identity = sizes.identity(pools.kv, rank.model_config)
        files = follower_files(sizes.config, host, identity, rank=links.place.rank, directory=agreed.files)
    runner, parts = rank_parts(
        sizes.config,
        rank.model_config,
        rank.model,
        links,
        Recording(decodes=machine.decodes, prefills=machine.prefills, capture=machine.capture),
        StepMemory(
            pool=pools.kv,
            windows=pools.windows,
            shadows=agreed.shadow_slots,
            host_pool=host.pool if host else None,
            host_states=host.states if host else None,
            backup_room=agreed.backup_room,
        ),
    )
    with memory_for_graphs():
        runner.running.record()
    states = None if parts.states is None else parts.states.pool
    own = RankPools(kv=pools.kv, held=sizes.held, states=states, windows=pools.windows)
    return BuiltRank(runner=runner, parts=parts, pools=own, kv=pools.memory(sizes.config, states), files=files)


def _actions(built: BuiltRank, profiler: TorchProfiler) -> dict[str, Action]:
    running, kv, files = built.runner.running, built.kv, built.files
    return {
        "use_weights": running.use,
        "drop_weights": running.drop,
        "release_kv": kv.release,
        "resume_kv": kv.resume,
        "start_profile": lambda asked: profiler.start(msgspec.convert(asked, StartProfile)),
        "stop_profile": profiler.stop,
        "checksum": _checksum(built.pools),
        "forget": lambda _: None,
        "answer": lambda: None,
        "kernels": kernels_here,
        **({} if files is None else {"read_page": files.read, "write_page": files.write}),
    }


def _checksum(pools: RankPools) -> Action:
    landed = threading.Event()
    checksum = RankChecksum(pools, wakeup=landed.set)

    def value_of(pages: Sequence[int], tail: Tail, num_tokens: int | None) -> Mapping[str, int]:
        value = checksum(pages, tail, num_tokens)
        while (found := value()) is None:
            landed.wait()
            landed.clear()
        return found

    return value_of


def _now(work: Callable[[], object]) -> object:
    """Run each message when it comes, behind all steps before it."""
    return work()
