"""A group of ranks in one process: the leader's engine here, each follower in a thread, over real sockets and shared memory.

With `nnodes` each machine has memory of its own, and TCP connections join their ranks. With `by_groups` ranks exchange what they compute
as on GPUs, with gloo in the place of NCCL.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.core_parts import EngineUse
from engine.device.measure import MemoryGauge
from engine.device.step_memory import MakeCapture
from engine.flags.nodes import ENGINE, PLAN, Wire, leader_of, node_of, wires
from engine.flags.resolve import resolve
from engine.kv.host_memory import HERE, HostMemory
from engine.kv.kv_pool import KVPool, zeroed_bytes
from engine.model_files.model_config import load_model_config
from engine.parallel.process_groups import RankGroups
from engine.parallel.region import SharedRegion, late_ranks
from engine.ranks.build import build_follower
from engine.ranks.follower import Follower
from engine.ranks.followers import Followers
from engine.ranks.group import Group
from engine.ranks.links import Joint, links_of, place_of, region_plan
from engine.ranks.messages import follower_end, leader_end
from engine.ranks.rank_parts import RankPools, RankUse
from service.process.message_stream import socket_pair
from tests.engine.engine_in_process import EngineInProcess

START_S = 60.0
END_S = 20.0


@dataclass
class Ranks:
    """`pools`, `followers`: by rank, once they are placed."""

    engine: EngineInProcess
    pools: dict[int, KVPool]
    followers: dict[int, Follower]


# A follower's transfer engine in a thread: its memory, and the socket of the leader.
Serve = Callable[[RankPools, socket.socket], object]


@contextmanager
def ranks(
    model_path: str,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    use: EngineUse | None = None,
    make: Callable[..., EngineInProcess] = EngineInProcess,
    serve: Serve | None = None,
    joint: Joint | None = None,
    by_groups: bool = False,
    capture: MakeCapture | None = None,
    gauge: Callable[[], MemoryGauge] | None = None,
    host: HostMemory = HERE,
    **flags: Any,
) -> Iterator[Ranks]:
    """An engine of `tp_size` times `pp_size` ranks, or with `joint` one of several, with the ranks of its DP rank. A follower's error ends the waits of all, and is raised at the end.

    `make`, `serve`: of a worker with a peer. `capture`, `gauge`, `host`: of every rank.
    """
    flags = {"max_total_tokens": 8192, "tp_size": tp_size, "pp_size": pp_size, **flags}
    given, model = EngineConfig(model_path=model_path, **flags), load_model_config(model_path)
    config = resolve(given, model, cuda=False)
    ends_with = None if joint is None else joint.region
    plan = region_plan(config, model)
    regions = [SharedRegion.create(plan, ends_with=ends_with) for _ in range(config.nnodes)]
    connected, undo = {wire: tcp_pair() for wire in wires(config, transfers=serve is not None)}, ExitStack()
    for sock in (sock for pair in connected.values() for sock in pair):
        undo.enter_context(sock)
    groups = partial(gloo_groups, dist.HashStore(), config) if by_groups else lambda rank: None
    errors: list[BaseException] = []
    pools: dict[int, KVPool] = {}
    followers: dict[int, Follower] = {}

    def abort() -> None:
        for region in regions:
            region.abort()

    def follow(rank: int, descriptor: int) -> None:
        channel = follower_end(descriptor)
        region = regions[node_of(rank, config)]
        try:
            assert region.descriptor is not None
            mine = SharedRegion.open(region.descriptor, region.plan, ends_with=ends_with)
            with torch.inference_mode():
                followers[rank], own = build_follower(
                    given,
                    model,
                    region=mine,
                    rank=rank,
                    channel=channel,
                    use=RankUse(decodes=True, prefills=True, name=f"rank{rank}", allocate_kv=zeroed_bytes),
                    turning=lambda _: None,
                    wires=ends_of(connected, rank),
                    joint=joint,
                    groups=groups(rank),
                    capture=capture,
                    gauge=gauge and gauge(),
                    host=host,
                )
                pools[rank] = own.kv
                if serve is not None:
                    engine = partial(serve, own, theirs_of[rank])
                    threading.Thread(target=engine, name=f"transfer engine of rank {rank}").start()
                followers[rank].run()
        except BaseException as error:
            errors.append(error)
            abort()
        finally:
            channel.close()

    members, threads = {}, []
    transfers: dict[int, socket.socket] = {}
    theirs_of: dict[int, socket.socket] = {}
    for rank in range(config.num_ranks):
        if rank == leader_of(config):
            continue
        own, theirs = pair_of(PLAN, connected, rank) or socket_pair()
        members[rank] = (leader_end(own), _Thread(rank))
        if serve is not None:
            transfers[rank], theirs_of[rank] = pair_of(ENGINE, connected, rank) or socket_pair()
        threads.append(threading.Thread(target=follow, args=(rank, theirs.detach()), name=f"rank {rank}"))
    group_ends = Followers(members, on_end=lambda text, refused: abort())
    for thread in threads:
        thread.start()
    try:
        leader = leader_of(config)
        group = Group(
            links=links_of(regions[0], leader, config, ends_of(connected, leader), joint=joint, groups=groups(leader)),
            pids={},
            transfers=transfers,
            followers=group_ends,
            timeout_s=START_S,
            late=partial(late_ranks, regions[0]),
            joint=joint,
        )
        seams: dict[str, Any] = {"capture": capture, "gauge": gauge and gauge()} if capture or gauge else {}
        seams |= {} if host is HERE else {"host": host}
        with make(model_path, group=group, **seams, **({} if use is None else {"use": use}), **flags) as engine:
            yield Ranks(engine, pools, followers)
    finally:
        for thread in threads:
            thread.join(END_S)
        for region in regions:
            region.close()
        undo.close()
        assert not errors, errors
        assert not any(thread.is_alive() for thread in threads)


def gloo_groups(store: dist.Store, config: EngineConfig, rank: int) -> RankGroups:
    """The groups that `process_groups.joined` makes, of threads."""
    place = place_of(rank, config)

    def group(name: str, index: int, size: int) -> dist.ProcessGroup | None:
        if size == 1:
            return None
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), index, size, timedelta(seconds=START_S))  # type: ignore[return-value]

    before, after = f"{rank - place.tp_size} to {rank}", f"{rank} to {rank + place.tp_size}"
    return RankGroups(
        stage=group(f"stage {place.pp_rank}", place.tp_rank, place.tp_size),
        memory=None,
        before=None if place.is_first_stage else group(before, 1, 2),
        after=None if place.is_last_stage else group(after, 0, 2),
    )


Pairs = dict[Wire, tuple[socket.socket, socket.socket]]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return server.accept()[0], there


def ends_of(connected: Pairs, rank: int) -> dict[str, socket.socket]:
    mine = ((wire, pair) for wire, pair in connected.items() if not wire.is_the_leaders)
    return {wire.end_of(rank): pair[wire.second == rank] for wire, pair in mine if rank in (wire.first, wire.second)}


def pair_of(kind: str, connected: Pairs, rank: int) -> tuple[socket.socket, socket.socket] | None:
    """The leader's end and that of a follower on another node than node 0."""
    return next((pair for wire, pair in connected.items() if (wire.kind, wire.second) == (kind, rank)), None)


@dataclass
class _Thread:
    rank: int

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    def ended(self) -> str:
        return "ended"
