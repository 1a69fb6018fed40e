"""What one rank shares with the others of its group, and its place among them."""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.executor.logit_rows import PROMPT_LOGPROB_ROWS
from engine.kv.held import holding_all
from engine.kv.kv_pool import DTYPES
from engine.model_files.model_config import ModelConfig
from engine.parallel.collectives import Collectives, SharedMemoryCollectives
from engine.parallel.layout import Place
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from engine.parallel.shared_tokens import SharedTokens
from engine.parallel.stage_link import StageLink
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
    before: StageLink | None
    after: StageLink | None


def leader_of(config: EngineConfig) -> int:
    """The rank whose process schedules: the first of the last stage, which has the logits."""
    return config.tp_size * (config.pp_size - 1)


def place_of(rank: int, config: EngineConfig) -> Place:
    """Ranks are numbered stage by stage."""
    return Place(
        tp_rank=rank % config.tp_size,
        tp_size=config.tp_size,
        pp_rank=rank // config.tp_size,
        pp_size=config.pp_size,
        partition=config.pp_layer_partition,
    )


def ranks_that_hold_all(config: EngineConfig, model: ModelConfig) -> list[int]:
    """Ranks that together hold every unit of every layer once, the leader among them. `config` is resolved."""
    ranks = [leader_of(config), *(rank for rank in range(config.num_ranks) if rank != leader_of(config))]
    return holding_all({rank: held_by(config, model, place_of(rank, config)) for rank in ranks})


def region_plan(config: EngineConfig, model: ModelConfig) -> RegionPlan:
    """What the ranks of `config`, which is resolved, need to share."""
    assert config.max_running_requests is not None, "resolved"
    return RegionPlan(
        ranks=config.tp_size,
        stages=config.pp_size,
        logits_rows=max(config.max_running_requests, PROMPT_LOGPROB_ROWS),
        vocab=model.vocab_size,
        slots=config.max_running_requests + 1,
        hidden=model.hidden_size,
        link_rows=min(largest_prompt_step(config), MOST_LINK_ROWS) if config.pp_size > 1 else 0,
        link_depth=2 * limits(config).micro_batches,
    )


def links_of(region: SharedRegion, rank: int, config: EngineConfig) -> RankLinks:
    """`config` is resolved."""
    place = place_of(rank, config)

    def link(stage: int) -> StageLink:
        return StageLink(region, stage=stage, rank=place.tp_rank, dtype=DTYPES[config.dtype])

    shared = SharedMemoryCollectives(region, rank=place.tp_rank, stage=place.pp_rank) if place.tp_size > 1 else None
    return RankLinks(
        place=place,
        num_ranks=config.num_ranks,
        collectives=shared,
        tokens=SharedTokens(region),
        before=None if place.is_first_stage else link(place.pp_rank - 1),
        after=None if place.is_last_stage else link(place.pp_rank),
    )
