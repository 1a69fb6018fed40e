"""Connections of one rank in its group, and its coordinates."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config import EngineConfig
from engine.device.graphs import max_recorded_rows
from engine.executor.step_part import PROMPT_LOGPROB_ROWS, FutureMap
from engine.flags.expert_flags import expert_plan
from engine.flags.model_source import dummy_paths
from engine.flags.nodes import SUM
from engine.flags.resolve import largest_prompt_step, limits
from engine.kv.kv_pool import DTYPES
from engine.model_files.model_config import ModelConfig
from engine.models.load import Load, load_model, within
from engine.parallel.collectives import SINGLE_RANK, Collectives, SharedMemoryCollectives
from engine.parallel.layout import Place
from engine.parallel.network import NetworkCollectives, RankConnection
from engine.parallel.process_groups import NcclCollectives, RankGroups
from engine.parallel.region import SharedRegion, SharedTokens
from engine.parallel.region_plan import RegionPlan
from engine.parallel.row_exchange import GroupRows, RowExchange, SharedMemoryRows
from engine.parallel.stage_link import GroupLink, HiddenStates, NetworkStageLink, StageLink

# ---- Input of a pipeline stage.


class StageInput:
    """Hidden states of the previous stage, instead of tokens.

    `room` [rows, hidden]: input of recorded steps. The link is outside graphs: padding may differ.
    """

    def __init__(self, link: HiddenStates, *, room: Tensor | None = None) -> None:
        self._link = link
        self._room = torch.empty(0) if room is None else room

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Receive [T, hidden]. Raises RanksEnded."""
        return self._link.receive(len(token_ids))

    def fill(self, rows: int) -> None:
        self._room[:rows].copy_(self._link.receive(rows))

    def recorded(self, token_ids: Tensor) -> Tensor:
        """Copy the input: layers change it, and padded rows must not grow over replays."""
        return self._room[: len(token_ids)].clone()


MAX_LINK_ROWS = 1024  # hidden states of more tokens are sent in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """Connections of a rank; with DP attention `num_ranks` counts all DP ranks.

    - collectives: of the stage; exchange: over DP ranks
    - tokens: the leader's samples on CPUs; share: see `SentFutureMap`, on GPUs
    - before, after: hidden states of neighbouring stages
    """

    place: Place
    num_ranks: int
    collectives: Collectives
    exchange: RowExchange | None
    tokens: SharedTokens | None
    share: Callable[[Tensor], None] | None
    before: HiddenStates | None
    after: HiddenStates | None

    def name_of(self, rank: int) -> str:
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
        link_rows=min(largest_prompt_step(config), MAX_LINK_ROWS) if config.pp_size > 1 else 0,
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
    """GPU ranks use `groups` instead of the region; `wires` lead to other machines."""
    place = place_of(rank, config, dp_rank=0 if joint is None else joint.dp_rank)
    if groups is not None:
        return _links_by_groups(groups, region.plan, place, config)
    others = {end: RankConnection(wire, region) for end, wire in (wires or {}).items()}

    def link(stage: int, end: str) -> HiddenStates:
        dtype = DTYPES[config.dtype]
        if end in others:
            return NetworkStageLink(others[end], hidden=region.plan.hidden, dtype=dtype)
        return StageLink(region, stage=stage, rank=place.tp_rank, dtype=dtype)

    exchange = None
    if joint is not None:
        exchange = SharedMemoryRows(SharedMemoryCollectives(joint.region, rank=place.mlp_rank), place=place)
    return RankLinks(
        place=place,
        num_ranks=config.num_ranks * place.dp_size,
        collectives=_collectives(region, place, config, others),
        exchange=exchange,
        tokens=SharedTokens(region),
        share=None,
        before=None if place.is_first_stage else link(place.pp_rank - 1, "before"),
        after=None if place.is_last_stage else link(place.pp_rank, "after"),
    )


def stage_input(links: RankLinks, config: EngineConfig, model: ModelConfig) -> StageInput | None:
    if links.before is None:
        return None
    if links.tokens is not None or config.disable_cuda_graph:  # on a CPU, or no step is recorded
        return StageInput(links.before)
    shape = max_recorded_rows(config, model), model.hidden_size
    return StageInput(links.before, room=torch.zeros(shape, dtype=DTYPES[config.dtype], device=config.device))


def _links_by_groups(groups: RankGroups, plan: RegionPlan, place: Place, config: EngineConfig) -> RankLinks:
    stage = None if groups.stage is None else NcclCollectives(groups.stage, memory=groups.memory)
    exchange = None
    if groups.joint is not None:
        exchange = GroupRows(groups.joint, stage=stage or SINGLE_RANK, place=place)

    def link(group: dist.ProcessGroup | None) -> HiddenStates | None:
        if group is None:
            return None
        return GroupLink(group, hidden=plan.hidden, dtype=DTYPES[config.dtype], device=torch.device(config.device))

    return RankLinks(
        place=place,
        num_ranks=config.num_ranks * place.dp_size,
        collectives=stage or SINGLE_RANK,
        exchange=exchange,
        tokens=None,
        share=stage.share if stage is not None and place.pp_size == 1 else None,
        before=link(groups.before),
        after=link(groups.after),
    )


def _collectives(
    region: SharedRegion, place: Place, config: EngineConfig, others: Mapping[str, RankConnection]
) -> Collectives:
    if place.tp_size == 1:
        return SINGLE_RANK
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


# ---- Loader of a rank's part of a checkpoint.


def loader(config: EngineConfig, model: ModelConfig, links: RankLinks | None, load: Load = load_model) -> Load:
    share: dict[str, Any] = {"reduce_units": config.reduce_units} if config.reduce_units or links else {}
    if model.drafter is not None:
        share["drafter"] = model.drafter
    if dummies := dummy_paths(config):
        share["dummies"] = dummies
    if links is not None:
        share |= {
            "place": links.place,
            "collectives": links.collectives,
            "exchange": links.exchange,
            "experts": expert_plan(config, model),
        }
    own = partial(load, dtype=config.dtype, device=config.device, quantization=config.quantization, **share)
    return lambda path, found, **more: own(path, within(found, config.context_length), **more)


class LeaderFutureMap(FutureMap):
    """Future map over ranks: the leader samples, followers need the tokens in the next step.

    CPUs share memory: followers wait for a count of sampled steps; rows are overwritten in later
    steps, which need every follower. GPUs broadcast copies. Stages plan with known tokens.
    """

    def __init__(self, shared: SharedTokens) -> None:
        super().__init__(shared.row)
        self._shared = shared

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        self._shared.publish(slots, tokens)


class FollowerFutureMap(FutureMap):
    def __init__(self, shared: SharedTokens) -> None:
        super().__init__(shared.row)
        self._shared = shared

    def resolve(self, token_ids: Tensor) -> Tensor:
        if bool((token_ids < 0).any()):
            self._shared.wait(self._shared.sampled)
        return super().resolve(token_ids)

    def on_sampled(self) -> None:
        self._shared.sampled += 1

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        raise AssertionError("a follower samples nothing")


class SentFutureMap(FutureMap):
    def __init__(self, last: Tensor, share: Callable[[Tensor], None]) -> None:
        super().__init__(last)
        self._share = share

    def on_sampled(self) -> None:
        self._share(self._last)


def future_map_of(links: RankLinks, *, leads: bool, device: torch.device, num_slots: int) -> FutureMap:
    if links.tokens is not None:
        return LeaderFutureMap(links.tokens) if leads else FollowerFutureMap(links.tokens)
    if links.share is None:
        return FutureMap.on(device, num_slots=num_slots)
    return SentFutureMap(torch.zeros(num_slots + 1, dtype=torch.int64, device=device), links.share)
