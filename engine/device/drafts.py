"""The drafter's part of a rank's steps, put together."""

from collections.abc import Sequence

from engine.attention.backend import make_attention_backend
from engine.config import EngineConfig
from engine.executor.draft_pass import DraftPass, PagedPool
from engine.models.decoder import DenseDecoder
from engine.sampler.make import TokenSampler


def make_draft_pass(
    config: EngineConfig, model: DenseDecoder, pools: Sequence[PagedPool], *, sampler: TokenSampler | None
) -> DraftPass | None:
    """None: the model has no drafter. `pools`: of all layers. `sampler`: of the rank that samples. Raises ConfigError."""
    drafter, pool = model.drafter, pools[0].pool
    if drafter is None:
        return None
    assert pool.drafter is not None, "pages have room for what the drafter keeps"
    return DraftPass(
        pools=pools,
        backend=make_attention_backend(
            config.attention_backend, pool.drafter, num_heads=drafter.num_heads, needs=drafter.attention_needs
        ),
        sampler=sampler,
        collectives=model.collectives,
    )
