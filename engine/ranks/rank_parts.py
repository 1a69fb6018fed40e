"""What computes a follower's part of steps: over its KV pool, or while memory is measured over a pool of scratch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.core.backups import NOTHING, CopySize
from engine.core.plan import Plan
from engine.device.device import ForwardParts, build_forward, context_pages, make_draft_pass
from engine.device.graphs import MakeCapture, make_graphs
from engine.device.host_copies import make_copies
from engine.executor.recorded_ends import FollowedEnd
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import AllocateBytes, KVPool
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.parallel.layout import share_of
from engine.ranks.future_maps import future_map_of
from engine.ranks.links import RankLinks, stage_input
from engine.ranks.rank_runner import RankRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """The uses of a follower by its worker. `decodes`, `prefills`: such steps are recorded. `name`: of the rank, in files."""

    decodes: bool
    prefills: bool
    name: str
    allocate_kv: AllocateBytes


def rank_parts(
    config: EngineConfig,
    model_config: ModelConfig,
    model: DenseDecoder,
    links: RankLinks,
    pool: KVPool,
    *,
    host_pool: HostPool | None = None,
    backup_room: CopySize = NOTHING,
    use: RankUse | None = None,
    capture: MakeCapture | None = None,
    max_pages: int | None = None,
    windows: KVPool | None = None,
    shadows: int = 0,
) -> tuple[RankRunner, ForwardParts]:
    """`config` is resolved. `use`: None: no steps are recorded. `windows`, `shadows`, `backup_room`: as `build_device` takes them."""
    assert config.max_running_requests is not None, "resolved"
    decodes = use is not None and use.decodes
    parts = build_forward(
        config,
        model,
        pool,
        num_heads=len(share_of(model_config, links.place).heads),
        tapes=decodes and capture is None,
        exchange=links.exchange,
        max_pages=max_pages,
        windows=windows,
        shadows=shadows,
        sees=model_config.vision is not None,
    )
    future_map = future_map_of(links, leads=False, device=pool.device, num_slots=config.max_running_requests)
    inputs = stage_input(links, config, model_config) or future_map
    graphs, prefill_graphs = make_graphs(
        config,
        decodes=decodes,
        prefills=use is not None and use.prefills,
        capture=capture,
        backend=parts.backend,
        page_table=parts.page_table,
        inputs=inputs,
        end=FollowedEnd(is_last=links.after is None),
        adapters=parts.adapters,
        has_states=parts.states is not None,
        is_watched=model.is_watched,
        sees=parts.sees,
        progress=False,
    )
    drafts = make_draft_pass(config, model, parts.pools(pool, windows), sampler=None)
    runner = RankRunner(
        model=model,
        copies=make_copies(
            backup_room,
            host_pool=host_pool,
            pool=pool,
            windows=windows,
            states=None if parts.states is None else parts.states.pool,
        ),
        forward_pass=parts.forward_pass(inputs, graphs=graphs, prefill_graphs=prefill_graphs, drafts=drafts),
        future_map=future_map,
        after=links.after,
        drafts=drafts,
    )
    return runner, parts


@contextmanager
def steps_of_rank(
    make: Callable[..., tuple[RankRunner, ForwardParts]], config: EngineConfig, pool: KVPool
) -> Iterator[Callable[[Plan], None]]:
    """Return the steps of a rank for `measure`."""
    runner, _ = make(pool, max_pages=context_pages(config))
    yield runner.run
    if pool.device.type == "cuda":
        torch.cuda.synchronize()
