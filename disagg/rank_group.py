"""Starts the followers of a leader, and ends them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from disagg.children import OPERATING_ERROR, POLL_S, Children
from disagg.config import RankSpec, SchedulerSpec
from engine.config import EngineConfig
from engine.local_defaults import shares_cores
from engine.model_files.model_config import ModelConfig
from engine.parallel.late import late_ranks
from engine.parallel.region import SharedRegion
from engine.ranks.channel import channel_pair, leader_end
from engine.ranks.followers import Followers
from engine.ranks.group import Group
from engine.ranks.links import leader_of, links_of, region_plan
from engine.resolve import resolve
from service.flags import ConfigError

STATUS_WAIT_S = 0.3  # a process that has closed its socket ends at once, unless it hangs


@contextmanager
def started_group(spec: SchedulerSpec, model: ModelConfig, *, mooncake_protocol: str | None) -> Iterator[Group | None]:
    """Start the followers; end them with the block. None: the worker has one rank. Raises ConfigError."""
    config = resolve(spec.engine, model, cuda=torch.cuda.is_available())
    if config.num_ranks == 1:
        yield None
        return
    if config.device == "cuda":
        raise ConfigError(
            f"--tp-size {config.tp_size}, --pp-size {config.pp_size}: ranks are for CPUs yet; on GPUs start more workers "
            "behind the router, or give --device cpu"
        )
    region = SharedRegion.create(region_plan(config, model))
    children = Children()
    with ExitStack() as undo:
        undo.callback(region.close)
        undo.callback(children.end)
        undo.callback(region.abort)
        group = _start(spec, config, region, children, mooncake_protocol)
        undo.callback(group.followers.close)  # first: from now on the end of a follower is no news
        yield group


def _start(
    spec: SchedulerSpec, config: EngineConfig, region: SharedRegion, children: Children, mooncake_protocol: str | None
) -> Group:
    assert region.descriptor is not None and config.num_threads is not None
    leader = leader_of(config)
    members, transfers, pids = {}, {}, {leader: os.getpid()}
    for rank in range(config.num_ranks):
        if rank == leader:
            continue
        own, theirs = channel_pair()
        with ExitStack() as passed:
            passed.enter_context(theirs)
            descriptors = [region.descriptor, theirs.fileno()]
            if spec.disagg.disaggregation_mode != "null":
                transfers[rank], engines = channel_pair()
                descriptors.append(passed.enter_context(engines).fileno())
            rank_spec = RankSpec(
                scheduler=spec,
                rank=rank,
                region=region.plan,
                descriptors=tuple(descriptors),
                mooncake_protocol=mooncake_protocol,
            )
            process = children.start(
                f"rank {rank}",
                "disagg.rank_process",
                ["--spec-json", msgspec.json.encode(rank_spec).decode()],
                num_threads=config.num_threads,
                descriptors=rank_spec.descriptors,
                shares_cores=shares_cores(config),
            )
        members[rank] = (leader_end(own), _RankProcess(process, rank=rank, of=config.num_ranks))
        pids[rank] = process.pid
    return Group(
        links=links_of(region, leader, config),
        pids=pids,
        followers=Followers(members, on_end=_end_worker, limit_s=config.watchdog_timeout_s),
        transfers=transfers,
        timeout_s=config.dist_timeout_s,
        late=partial(late_ranks, region),
    )


@dataclass
class _RankProcess:
    process: "subprocess.Popen[bytes]"
    rank: int
    of: int

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.of} (pid {self.process.pid})"

    def ended(self) -> str:
        deadline_s = time.monotonic() + STATUS_WAIT_S
        while (status := self.process.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        if status is None:
            return "closed its socket"
        return f"ended: {signal.Signals(-status).name}" if status < 0 else f"ended: status {status}"


def _end_worker(text: str, refused: bool) -> None:
    """Without one rank none can go on. The kernel ends the other followers with this process."""
    print(f"tandem serve: error: {text}", file=sys.stderr, flush=True)
    os._exit(OPERATING_ERROR)
