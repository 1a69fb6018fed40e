"""Connections of one rank in its group, and its coordinates."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config import EngineConfig
from engine.device.graphs import most_recorded_rows
from engine.executor.logit_rows import PROMPT_LOGPROB_ROWS
from engine.flags.nodes import SUM
from engine.flags.resolve import largest_prompt_step, limits
from engine.kv.kv_pool import DTYPES
from engine.model_files.model_config import ModelConfig
from engine.parallel.collectives import Collectives, SharedMemoryCollectives
from engine.parallel.layout import Place
from engine.parallel.nccl import NcclCollectives
from engine.parallel.network import NetworkCollectives
from engine.parallel.process_groups import RankGroups
from engine.parallel.rank_connection import RankConnection
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from engine.parallel.row_exchange import RowExchange
from engine.parallel.shared_tokens import SharedTokens
from engine.parallel.stage_link import GroupLink, HiddenStates, NetworkStageLink, StageLink
from engine.ranks.stages import StageInput

MOST_LINK_ROWS = 1024  # hidden states of more tokens are sent in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """Connections of a rank; with DP attention `num_ranks` counts all DP ranks.

    - collectives: of the stage, if several; exchange: over DP ranks
    - tokens: the leader's samples on CPUs; share: see `SentFutureMap`, on GPUs
    - before, after: hidden states of neighbouring stages
    """

    place: Place
    num_ranks: int
    collectives: Collectives | None
    exchange: RowExchange | None
    tokens: SharedTokens | None
    share: Callable[[Tensor], None] | None
    before: HiddenStates | None
    after: HiddenStates | None

    def name_of(self, rank: int) -> str:
        """ "rank 3 of 4", counted over DP ranks."""
        return f"rank {self.place.dp_rank * self.place.tp_size + rank} of {self.num_ranks}"


def place_of(rank: int, config: EngineConfig, *, dp_rank: int = 0) -> Place:
    """Ranks are numbered by stage."""
    size = config.attention_tp_size
    return Place(
        tp_rank=rank % size,
        tp_size=size,
        pp_rank=rank // size,
        pp_size=config.pp_size,
        dp_rank=dp_rank if config.enable_dp_attention else 0,
        dp_size=config.dp_size if config.enable_dp_attention else 1,
        ep_size=config.ep_size,
        partition=config.pp_layer_partition,
    )


def region_plan(config: EngineConfig, model: ModelConfig) -> RegionPlan:
    """Shared memory layout of one machine; remote stages stay unused."""
    assert config.max_running_requests is not None, "resolved"
    return RegionPlan(
        ranks=min(config.attention_tp_size, config.ranks_here),
        stages=config.pp_size,
        logits_rows=max(config.max_running_requests, PROMPT_LOGPROB_ROWS),
        vocab=model.vocab_size,
        slots=config.max_running_requests + 1,
        hidden=model.hidden_size,
        link_rows=min(largest_prompt_step(config), MOST_LINK_ROWS) if config.pp_size > 1 else 0,
        link_depth=2 * limits(config).micro_batches,
    )


@dataclass(frozen=True, slots=True)
class Joint:
    region: SharedRegion
    dp_rank: int


def links_of(
    region: SharedRegion,
    rank: int,
    config: EngineConfig,
    wires: Mapping[str, socket.socket] | None = None,
    *,
    joint: Joint | None = None,
    groups: RankGroups | None = None,
) -> RankLinks:
    """Connect a rank; `wires` are its connections to other machines.

    GPU ranks use `groups` instead of the region.
    """
    place = place_of(rank, config, dp_rank=0 if joint is None else joint.dp_rank)
    if groups is not None:
        return _links_by_groups(groups, region.plan, place, config)
    others = {end: RankConnection(wire, region) for end, wire in (wires or {}).items()}

    def link(stage: int, end: str) -> HiddenStates:
        dtype = DTYPES[config.dtype]
        if end in others:
            return NetworkStageLink(others[end], hidden=region.plan.hidden, dtype=dtype)
        return StageLink(region, stage=stage, rank=place.tp_rank, dtype=dtype)

    return RankLinks(
        place=place,
        num_ranks=config.num_ranks * place.dp_size,
        collectives=_collectives(region, place, config, others),
        exchange=None if joint is None else _exchange(joint.region, place),
        tokens=SharedTokens(region),
        share=None,
        before=None if place.is_first_stage else link(place.pp_rank - 1, "before"),
        after=None if place.is_last_stage else link(place.pp_rank, "after"),
    )


def _exchange(region: SharedRegion, place: Place) -> RowExchange:
    return RowExchange(SharedMemoryCollectives(region, rank=place.mlp_rank), place=place)


def stage_input(links: RankLinks, config: EngineConfig, model: ModelConfig) -> StageInput | None:
    if links.before is None:
        return None
    if links.tokens is not None or config.disable_cuda_graph:  # on a CPU, or no step is recorded
        return StageInput(links.before)
    shape = most_recorded_rows(config), model.hidden_size
    return StageInput(links.before, room=torch.zeros(shape, dtype=DTYPES[config.dtype], device=config.device))


def _links_by_groups(groups: RankGroups, plan: RegionPlan, place: Place, config: EngineConfig) -> RankLinks:
    stage = None if groups.stage is None else NcclCollectives(groups.stage, memory=groups.memory)

    def link(group: dist.ProcessGroup | None) -> HiddenStates | None:
        if group is None:
            return None
        return GroupLink(group, hidden=plan.hidden, dtype=DTYPES[config.dtype], device=torch.device(config.device))

    return RankLinks(
        place=place,
        num_ranks=config.num_ranks,
        collectives=stage,
        exchange=None,
        tokens=None,
        share=stage.share if stage is not None and place.pp_size == 1 else None,
        before=link(groups.before),
        after=link(groups.after),
    )


def _collectives(
    region: SharedRegion, place: Place, config: EngineConfig, others: Mapping[str, RankConnection]
) -> Collectives | None:
    if place.tp_size == 1:
        return None
    sums = [others[end] for end in sorted(others) if end.startswith(SUM)]
    if not sums:
        return SharedMemoryCollectives(region, rank=place.tp_rank, stage=place.pp_rank)
    here = config.ranks_here
    return NetworkCollectives(
        region,
        local_rank=place.tp_rank % here,
        machine=place.tp_rank // here,
        others=sums,
    )
