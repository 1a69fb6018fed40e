"""What one rank shares with the others of its group, and its place among them."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.executor.logit_rows import PROMPT_LOGPROB_ROWS
from engine.kv.held import copies_of
from engine.kv.kv_pool import DTYPES
from engine.model_files.model_config import ModelConfig
from engine.parallel.collectives import Collectives, SharedMemoryCollectives
from engine.parallel.layout import Place
from engine.parallel.network import NetworkCollectives
from engine.parallel.network_link import NetworkStageLink
from engine.parallel.rank_connection import RankConnection
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from engine.parallel.shared_tokens import SharedTokens
from engine.parallel.stage_link import HiddenStates, StageLink
from engine.pool import held_by
from engine.resolve import largest_prompt_step, limits

MOST_LINK_ROWS = 1024  # hidden states of more tokens go from stage to stage in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """`collectives`: of the stage; None: the rank is its stage. `tokens`: sampled by the leader.

    `before`, `after`: hidden states from and to the neighbouring stages.
    """

    place: Place
    num_ranks: int
    collectives: Collectives | None
    tokens: SharedTokens
    before: HiddenStates | None
    after: HiddenStates | None


def place_of(rank: int, config: EngineConfig) -> Place:
    """Ranks are numbered stage by stage."""
    return Place(
        tp_rank=rank % config.tp_size,
        tp_size=config.tp_size,
        pp_rank=rank // config.tp_size,
        pp_size=config.pp_size,
        partition=config.pp_layer_partition,
    )


def kv_copies(config: EngineConfig, model: ModelConfig) -> list[list[int]]:
    """Ranks that hold the same units and layers; together everything. `config` is resolved."""
    return copies_of({rank: held_by(config, model, place_of(rank, config)) for rank in range(config.num_ranks)})


def region_plan(config: EngineConfig, model: ModelConfig) -> RegionPlan:
    """What the ranks of one machine need to share. `config` is resolved. Stages elsewhere keep their place in it, unused."""
    assert config.max_running_requests is not None, "resolved"
    return RegionPlan(
        ranks=min(config.tp_size, config.ranks_here),
        stages=config.pp_size,
        logits_rows=max(config.max_running_requests, PROMPT_LOGPROB_ROWS),
        vocab=model.vocab_size,
        slots=config.max_running_requests + 1,
        hidden=model.hidden_size,
        link_rows=min(largest_prompt_step(config), MOST_LINK_ROWS) if config.pp_size > 1 else 0,
        link_depth=2 * limits(config).micro_batches,
    )


def links_of(
    region: SharedRegion, rank: int, config: EngineConfig, wires: Mapping[str, socket.socket] | None = None
) -> RankLinks:
    """`config` is resolved. `wires`: connections of this rank to those of other machines, by its end of them (engine/nodes.py)."""
    place = place_of(rank, config)
    others = {end: RankConnection(wire, region) for end, wire in (wires or {}).items()}

    def link(stage: int, end: str) -> HiddenStates:
        dtype = DTYPES[config.dtype]
        if end in others:
            return NetworkStageLink(others[end], hidden=region.plan.hidden, dtype=dtype)
        return StageLink(region, stage=stage, rank=place.tp_rank, dtype=dtype)

    return RankLinks(
        place=place,
        num_ranks=config.num_ranks,
        collectives=_collectives(
            region, place, config, [others[end] for end in sorted(others) if end.startswith("sum")]
        ),
        tokens=SharedTokens(region),
        before=None if place.is_first_stage else link(place.pp_rank - 1, "before"),
        after=None if place.is_last_stage else link(place.pp_rank, "after"),
    )


def _collectives(
    region: SharedRegion, place: Place, config: EngineConfig, others: Sequence[RankConnection]
) -> Collectives | None:
    if place.tp_size == 1:
        return None
    if not others:
        return SharedMemoryCollectives(region, rank=place.tp_rank, stage=place.pp_rank)
    here = config.ranks_here
    return NetworkCollectives(region, local_rank=place.tp_rank % here, machine=place.tp_rank // here, others=others)
