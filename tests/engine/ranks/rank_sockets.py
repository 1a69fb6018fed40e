"""Sockets and groups that join the ranks of one process: TCP in the place of a network, gloo of NCCL's."""

import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from engine.config import EngineConfig
from engine.flags.nodes import Wire
from engine.parallel.process_groups import JointGroups, RankGroups
from engine.ranks.links import place_of
from service.process.message_stream import socket_pair

ByGroups = bool | dist.Store  # whether ranks exchange by groups; with DP attention, where all DP ranks meet


def gloo_groups(
    config: EngineConfig, *, wanted: ByGroups, dp_rank: int, timeout_s: float
) -> Callable[[int], RankGroups | None]:
    """The groups that `process_groups.joined` makes of a rank, of threads."""
    store, timeout = dist.HashStore(), timedelta(seconds=timeout_s)
    joint = wanted if isinstance(wanted, dist.Store) else None
    if not wanted:
        return lambda rank: None

    def made(name: str, index: int, size: int, where: dist.Store) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, where), index, size, timeout)  # type: ignore[return-value]

    def group(name: str, index: int, size: int) -> dist.ProcessGroup | None:
        return None if size == 1 else made(name, index, size, store)

    def groups_of(rank: int) -> RankGroups:
        place, of_all = place_of(rank, config, dp_rank=dp_rank), None
        if joint is not None:
            of_all = JointGroups(
                ranks=made("all", place.mlp_rank, place.mlp_size, joint),
                memory=None,
                across=made(f"across {place.tp_rank}", place.dp_rank, place.dp_size, joint),
            )
        before, after = f"{rank - place.tp_size} to {rank}", f"{rank} to {rank + place.tp_size}"
        return RankGroups(
            stage=group(f"stage {place.pp_rank}", place.tp_rank, place.tp_size),
            memory=None,
            before=None if place.is_first_stage else group(before, 1, 2),
            after=None if place.is_last_stage else group(after, 0, 2),
            joint=of_all,
        )

    return groups_of


Pairs = dict[Wire, tuple[socket.socket, socket.socket]]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return server.accept()[0], there


def ends_of(connected: Pairs, rank: int) -> dict[str, socket.socket]:
    mine = ((wire, pair) for wire, pair in connected.items() if not wire.is_the_leaders)
    return {wire.end_of(rank): pair[wire.second == rank] for wire, pair in mine if rank in (wire.first, wire.second)}


def pair_of(kind: str, connected: Pairs, rank: int) -> tuple[socket.socket, socket.socket]:
    """The leader's end and that of a follower, by TCP where it is on another node than node 0."""
    pairs = (pair for wire, pair in connected.items() if (wire.kind, wire.second) == (kind, rank))
    return next(pairs, None) or socket_pair()
