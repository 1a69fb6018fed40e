"""The drafter's part of a rank's steps, put together."""

from engine.attention.backend import make_attention_backend
from engine.config import EngineConfig
from engine.executor.draft_pass import DraftPass
from engine.executor.future_map import FutureMap
from engine.kv.kv_pool import KVPool
from engine.kv.page_table import PageTable
from engine.models.decoder import DenseDecoder
from engine.sampler.make import TokenSampler


def make_draft_pass(
    config: EngineConfig,
    model: DenseDecoder,
    pool: KVPool,
    *,
    page_table: PageTable,
    future_map: FutureMap,
    sampler: TokenSampler | None,
) -> DraftPass | None:
    """None: the model has no drafter. `sampler`: of the rank that samples. Raises ConfigError."""
    drafter = model.drafter
    if drafter is None:
        return None
    assert pool.drafter is not None, "pages have room for what the drafter keeps"
    return DraftPass(
        pool=pool,
        backend=make_attention_backend(
            config.attention_backend, pool.drafter, num_heads=drafter.num_heads, needs=drafter.attention_needs
        ),
        page_table=page_table,
        future_map=future_map,
        sampler=sampler,
        collectives=model.collectives,
    )
