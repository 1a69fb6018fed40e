"""A group of ranks in one process: the leader's engine here, each follower in a thread, over real sockets and shared memory.

With `nnodes` each machine has memory of its own, and TCP connections join their ranks. With `by_groups` ranks exchange what they compute
as on GPUs, with gloo in the place of NCCL.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engine.assembly.follower import Connect, build_follower
from engine.config import EngineConfig
from engine.device.step_memory import UNIFIED, EngineUse, LocalMachine, MakeCapture, MemoryGauge
from engine.flags.nodes import ENGINE, PLAN, leader_of, node_of, wires
from engine.flags.resolve import resolve
from engine.kv.host_memory import HERE, HostMemory
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import load_model_config
from engine.parallel.region import SharedRegion, late_ranks
from engine.ranks.follower import Follower
from engine.ranks.followers import Followers, Process
from engine.ranks.group import Group
from engine.ranks.links import Joint, links_of, region_plan
from engine.ranks.messages import follower_end, leader_end
from engine.ranks.rank_parts import RankPools
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.rank_sockets import ByGroups, ends_of, gloo_groups, pair_of, tcp_pair

START_S = 60.0
END_S = 20.0

# Sizes of a model that four ranks can cut.
FOR_RANKS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 128}


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
    by_groups: ByGroups = False,
    capture: MakeCapture | None = None,
    gauge: Callable[[], MemoryGauge] | None = None,
    host: HostMemory = HERE,
    **flags: Any,
) -> Iterator[Ranks]:
    """An engine of `tp_size` times `pp_size` ranks, be it one, or with `joint` one of several, with the ranks of its DP rank. A follower's error ends the waits of all, and is raised at the end.

    `make`, `serve`: of a worker with a peer. `capture`, `gauge`, `host`: of every rank.
    """
    flags = {"max_total_tokens": 8192, "tp_size": tp_size, "pp_size": pp_size, **flags}
    config = EngineConfig(model_path=model_path, **flags)

    def machine() -> LocalMachine:
        return LocalMachine(capture=capture, gauge=gauge and gauge(), host=host)

    given: dict[str, Any] = {"machine": machine(), **({} if use is None else {"use": use})}
    if config.num_ranks == 1 and joint is None:
        with make(model_path, **given, **flags) as engine:
            yield Ranks(engine, {}, {})
        return
    group = _Group(config, machine=machine, serve=serve, joint=joint, by_groups=by_groups)
    with group.started() as leader, make(model_path, group=leader, **given, **flags) as engine:
        yield Ranks(engine, group.pools, group.followers)


@contextmanager
def engine_of(model_path: str, **flags: Any) -> Iterator[EngineInProcess]:
    """The engine of `ranks`."""
    with ranks(model_path, **flags) as group:
        yield group.engine


class _Group:
    """Ranks of one engine, each follower in a thread."""

    def __init__(
        self,
        given: EngineConfig,
        *,
        machine: Callable[[], LocalMachine],
        serve: Serve | None,
        joint: Joint | None,
        by_groups: ByGroups,
    ) -> None:
        self.pools: dict[int, KVPool] = {}
        self.followers: dict[int, Follower] = {}
        self._given, self._model = given, load_model_config(given.model_path)
        self._config = config = resolve(given, self._model, cuda=False)
        self._machine, self._serve, self._joint = machine, serve, joint
        self._ends_with = None if joint is None else joint.region
        plan = region_plan(config, self._model)
        self._regions = [SharedRegion.create(plan, ends_with=self._ends_with) for _ in range(config.nnodes)]
        self._connected = {wire: tcp_pair() for wire in wires(config, transfers=serve is not None)}
        dp_rank = 0 if joint is None else joint.dp_rank
        self._groups = gloo_groups(config, wanted=by_groups, dp_rank=dp_rank, timeout_s=START_S)
        self._errors: list[BaseException] = []

    @contextmanager
    def started(self) -> Iterator[Group]:
        members, threads = {}, []
        transfers: dict[int, socket.socket] = {}
        for rank in sorted(set(range(self._config.num_ranks)) - {leader_of(self._config)}):
            own, theirs = pair_of(PLAN, self._connected, rank)
            members[rank] = (leader_end(own), Process(f"rank {rank}", lambda: "ended"))
            engines = None
            if self._serve is not None:
                transfers[rank], engines = pair_of(ENGINE, self._connected, rank)
            threads.append(
                threading.Thread(target=self._follow, args=(rank, theirs.detach(), engines), name=f"rank {rank}")
            )
        followers = Followers(members, on_end=lambda text, refused: self._abort())
        for thread in threads:
            thread.start()
        try:
            yield Group(
                links=self._connect(self._regions[0], leader_of(self._config))(self._config),
                pids={},
                transfers=transfers,
                followers=followers,
                timeout_s=START_S,
                late=partial(late_ranks, self._regions[0]),
                joint=self._joint,
            )
        finally:
            for thread in threads:
                thread.join(END_S)
            for region in self._regions:
                region.close()
            for sock in (sock for pair in self._connected.values() for sock in pair):
                sock.close()
            assert not self._errors, self._errors
            assert not any(thread.is_alive() for thread in threads)

    def _connect(self, region: SharedRegion, rank: int) -> Connect:
        ends, groups = ends_of(self._connected, rank), self._groups(rank)
        return partial(links_of, region, rank, wires=ends, joint=self._joint, groups=groups)

    def _follow(self, rank: int, descriptor: int, engines: socket.socket | None) -> None:
        channel, region = follower_end(descriptor), self._regions[node_of(rank, self._config)]
        try:
            assert region.descriptor is not None
            mine = SharedRegion.open(region.descriptor, region.plan, ends_with=self._ends_with)
            with torch.inference_mode():
                self.followers[rank], own = build_follower(
                    self._given,
                    self._model,
                    channel,
                    connect=self._connect(mine, rank),
                    use=replace(UNIFIED, name=f"rank{rank}"),
                    turning=lambda _: None,
                    machine=self._machine(),
                )
                self.pools[rank] = own.kv
                if self._serve is not None and engines is not None:
                    serve = partial(self._serve, own, engines)
                    threading.Thread(target=serve, name=f"transfer engine of rank {rank}").start()
                self.followers[rank].run()
        except BaseException as error:
            self._errors.append(error)
            self._abort()
        finally:
            channel.close()

    def _abort(self) -> None:
        for region in self._regions:
            region.abort()
