"""Start and end of a leader's followers, on this and other machines."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch

from disagg.config import RankSpec, SchedulerSpec, read_secret
from disagg.processes.children import OPERATING_ERROR, Children
from disagg.processes.joint_memory import joint_plan
from disagg.processes.rank_start import how_ended, start_rank
from disagg.processes.rendezvous import Met, NodeBye, gathered
from engine.config import EngineConfig
from engine.flags.nodes import check_nodes, leader_of, node_of, ranks_of
from engine.flags.resolve import resolve
from engine.model_files.model_config import ModelConfig
from engine.parallel.process_groups import joined
from engine.parallel.region import SharedRegion, late_ranks, ranks_without_row
from engine.parallel.region_plan import new_store
from engine.ranks.followers import Followers, Member, Process
from engine.ranks.group import Group
from engine.ranks.links import Joint, links_of, place_of, region_plan
from engine.ranks.messages import leader_end
from service.process.message_stream import ChannelClosed, ChannelFull, socket_pair

OWN_GPU = torch.device("cuda", 0)  # each rank can use only one
SILENT_S = 1.0  # a host that only enqueues steps answers much faster


@contextmanager
def started_group(spec: SchedulerSpec, model: ModelConfig) -> Iterator[Group | None]:
    """None for one rank. Raises ConfigError.

    With DP attention even a single-rank scheduler has a group.
    """
    config = resolve(spec.engine, model, cuda=torch.cuda.is_available())
    if config.num_ranks == 1 and spec.joint is None:
        yield None
        return
    check_nodes(config)  # again: the device is known now
    plan = region_plan(config, model)
    children = Children()
    with ExitStack() as undo:
        met = None
        if config.nnodes > 1:
            secret = read_secret(spec.disagg.cluster_secret_file) or b""
            met = undo.enter_context(gathered(spec.engine, spec.disagg, plan, secret=secret))
        store = None
        if config.device == "cuda":
            store = new_store() if spec.joint is None else spec.joint.store
            undo.callback(os.close, store)
        joint = None
        if spec.joint is not None:
            joint = Joint(SharedRegion.open(spec.joint.memory, joint_plan(config)), spec.dp_rank)
        region = SharedRegion.create(plan, ends_with=joint.region if joint else None)
        undo.callback(region.close)
        undo.callback(children.end)
        undo.callback(region.abort)
        start = _Start(spec, config, model.vision is not None, region, children, joint=joint, met=met, store=store)
        yield start.group(undo)
        if met is not None:
            for control in met.controls.values():
                with suppress(ChannelClosed, ChannelFull):
                    control.send(NodeBye())


@dataclass
class _Start:
    """`sees`: the model takes images."""

    spec: SchedulerSpec
    config: EngineConfig
    sees: bool
    region: SharedRegion
    children: Children
    _: KW_ONLY
    joint: Joint | None
    met: Met | None
    store: int | None
    members: dict[int, Member] = field(default_factory=dict, init=False)
    transfers: dict[int, socket.socket] = field(default_factory=dict, init=False)
    pids: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def first(self) -> int:
        return 0 if self.joint is None else self.joint.dp_rank * self.config.num_ranks

    def group(self, undo: ExitStack) -> Group:
        """`undo` closes the followers before anything else ends them."""
        config, region, joint, leader = self.config, self.region, self.joint, leader_of(self.config)
        self.pids[self.first + leader] = os.getpid()
        for rank in ranks_of(0, config):
            if rank != leader:
                self._start(rank)
        if self.met is not None:
            for rank in sorted(set(range(config.num_ranks)) - set(ranks_of(0, config))):
                self._take(rank, self.met)
        # Before the leader meets its followers, so that an early end is reported.
        followers = Followers(
            self.members,
            on_end=_end_worker,
            limit_s=config.watchdog_timeout_s,
            copies_beside=config.device == "cuda",
            num_first=config.attention_tp_size,
        )
        undo.callback(followers.close)  # first: afterwards a follower's end is expected
        groups, late = None, partial(_late, region, config)
        if joint is not None:
            late = partial(_late_of_all, region, joint, self.first)
        if self.store is not None:
            place = place_of(leader, config, dp_rank=self.spec.dp_rank)
            groups = joined(self.store, place, OWN_GPU, timeout_s=config.dist_timeout_s)
            late = partial(_late_hosts, followers, config, joint)
        return Group(
            links=links_of(region, leader, config, _wires(self.met, leader), joint=joint, groups=groups),
            pids=self.pids,
            followers=followers,
            transfers=self.transfers,
            timeout_s=config.dist_timeout_s,
            joint=joint,
            late=late,
        )

    @property
    def _has_transfers(self) -> bool:
        return self.spec.disagg.disaggregation_mode != "null"

    def _start(self, rank: int) -> None:
        assert self.region.descriptor is not None
        own, theirs = socket_pair()
        with ExitStack() as passed:
            passed.enter_context(theirs)
            descriptors = [self.region.descriptor, theirs.fileno()]
            if self._has_transfers:
                self.transfers[rank], engines = socket_pair()
                descriptors.append(passed.enter_context(engines).fileno())
            wires = {end: passed.enter_context(sock).fileno() for end, sock in _wires(self.met, rank).items()}
            spec = RankSpec(
                scheduler=self.spec,
                rank=rank,
                region=self.region.plan,
                descriptors=tuple(descriptors),
                wires=wires,
                store=self.store,
            )
            process = start_rank(self.children, spec)
        named = Process(f"{spec.name} (pid {process.pid})", partial(how_ended, process))
        self.members[rank] = (leader_end(own, sees=self.sees), named)
        self.pids[self.first + rank] = process.pid

    def _take(self, rank: int, met: Met) -> None:
        node = node_of(rank, self.config)
        name = f"rank {rank} of {self.config.num_ranks} (node {node}, {met.controls[node].peer})"
        gone = f"is gone: its process has ended, or its machine; the log of node {node} may say why"
        self.members[rank] = (leader_end(met.plan_of(rank), sees=self.sees), Process(name, lambda: gone))
        if self._has_transfers:
            self.transfers[rank] = met.engine_of(rank)


def _wires(met: Met | None, rank: int) -> dict[str, socket.socket]:
    return {} if met is None else met.of_rank(rank)


def _late(region: SharedRegion, config: EngineConfig) -> list[int]:
    """The late ranks; all if another machine may be the cause."""
    late = late_ranks(region)
    return list(range(config.num_ranks)) if config.sums_span_nodes and len(late) == config.ranks_here else late


def _late_of_all(region: SharedRegion, joint: Joint, first: int) -> list[int]:
    """Late ranks: in a joint sum, without a step's row, or ours."""
    late = late_ranks(joint.region)
    if len(late) < joint.region.plan.ranks:
        return late
    size = region.plan.ranks
    return [rank * size for rank in ranks_without_row(joint.region)] or [first + rank for rank in late_ranks(region)]


def _late_hosts(followers: Followers, config: EngineConfig, joint: Joint | None) -> list[int]:
    """Ranks with hanging hosts; all if a GPU hangs, as waiting sums look alike."""
    size, silent = config.num_ranks, followers.silent(within_s=SILENT_S)
    if joint is None:
        return silent or list(range(size))
    if silent:
        return [joint.dp_rank * size + rank for rank in silent]
    return [rank * size for rank in ranks_without_row(joint.region)] or list(range(joint.region.plan.ranks))


def _end_worker(text: str, refused: bool) -> None:
    """No rank can continue. The kernel ends other followers."""
    print(f"tandem serve: error: {text}", file=sys.stderr, flush=True)
    os._exit(OPERATING_ERROR)
