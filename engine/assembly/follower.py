"""Assembly of a follower in step with its leader: model, pools, and work besides steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.assembly.follower_rooms import FOLLOWER_ROOMS, Actions, BuiltRank, Readers
from engine.assembly.loading import THIS_MACHINE, LoadedRank, LocalMachine, load_rank, resolved, share_loader
from engine.assembly.sizes import MemorySizes, fitting_sizes
from engine.config import EngineConfig
from engine.device.step_memory import EngineUse, Recording, StepMemory, memory_for_graphs
from engine.flags.rank_rules import check_device
from engine.kv.host_pool import allocate_host_pool
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.ranks.follower import Follower
from engine.ranks.links import RankLinks, loader
from engine.ranks.messages import Channel, Loaded, PoolSize, Serving, ToFollower
from engine.ranks.rank_parts import RankPools, rank_parts, steps_of_rank

Connect = Callable[[EngineConfig], RankLinks]


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

    Raises ConfigError, and ChannelClosed where the leader ends. On a GPU all that the calling
    thread enqueues from here on runs in one stream.
    """
    config, model = resolved(given, stored, check_device)
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
    readers: Readers = {"weights": lambda path: load(path, load_model_config(path), progress=False)}
    actions: Actions = {}
    for room in FOLLOWER_ROOMS:
        room(built, readers, actions)
    channel.send(Serving())
    return Follower(channel, built.runner, readers=readers, actions=actions, turning=turning), built.pools


def _build(rank: LoadedRank, sizes: MemorySizes, agreed: PoolSize, links: RankLinks, use: EngineUse) -> BuiltRank:
    """Allocate what the leader has agreed, and record steps. Raises ConfigError."""
    pools, host_pool = sizes.pools(use, apart=agreed.apart), None
    if agreed.host_pages:
        flag = "--enable-hierarchical-cache"
        host_pool = allocate_host_pool(pools.kv, agreed.host_pages, flag=flag, remedy="leave it out")
    runner, parts = rank_parts(
        sizes.config,
        rank.model_config,
        rank.model,
        links,
        Recording(decodes=use.decodes, prefills=use.prefills, capture=rank.machine.capture),
        StepMemory(
            pool=pools.kv,
            windows=pools.windows,
            shadows=agreed.shadow_slots,
            host_pool=host_pool,
            backup_room=agreed.backup_room,
        ),
    )
    with memory_for_graphs():
        runner.running.record()
    states = None if parts.states is None else parts.states.pool
    return BuiltRank(
        rank=rank,
        sizes=sizes,
        runner=runner,
        parts=parts,
        kv=pools.memory(sizes.config, states),
        pools=RankPools(kv=pools.kv, held=sizes.held, states=states, windows=pools.windows),
        host_pool=host_pool,
        folder=Path(agreed.files) / f"rank{links.place.rank}" if agreed.files else None,
        use=use,
    )
