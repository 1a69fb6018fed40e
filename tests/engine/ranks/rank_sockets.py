"""Sockets and groups that join the ranks of one process: TCP in the place of a network, gloo of NCCL's."""

import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from engine.config import EngineConfig
from engine.flags.nodes import Wire
from engine.parallel.process_groups import RankGroups
from engine.ranks.links import place_of
from service.process.message_stream import socket_pair


def gloo_groups(config: EngineConfig, *, timeout_s: float) -> Callable[[int], RankGroups]:
    """The groups that `process_groups.joined` makes of a rank, of threads."""
    store, timeout = dist.HashStore(), timedelta(seconds=timeout_s)

    def group(name: str, index: int, size: int) -> dist.ProcessGroup | None:
        if size == 1:
            return None
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), index, size, timeout)  # type: ignore[return-value]

    def groups_of(rank: int) -> RankGroups:
        place = place_of(rank, config)
        before, after = f"{rank - place.tp_size} to {rank}", f"{rank} to {rank + place.tp_size}"
        return RankGroups(
            stage=group(f"stage {place.pp_rank}", place.tp_rank, place.tp_size),
            memory=None,
            before=None if place.is_first_stage else group(before, 1, 2),
            after=None if place.is_last_stage else group(after, 0, 2),
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
