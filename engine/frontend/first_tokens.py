"""Tokens through scheduler, model and detokenizer without a client: for /health_generate, and before a worker is ready.

In a disaggregated role no KV is transferred: the request names the fake bootstrap server, which both roles know.
"""

import asyncio

from engine.frontend.services import Services
from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap, GenerateRequest
from engine.sampling_params import SamplingParams


async def compute_tokens(s: Services, count: int, *, name: str, timeout_s: float | None) -> None:
    """On every DP rank. Raises ApiError, TimeoutError."""
    await asyncio.gather(*(_compute(s, count, r, name=name, timeout_s=timeout_s) for r in range(s.leaders.num_ranks)))


async def _compute(s: Services, count: int, rank: int, *, name: str, timeout_s: float | None) -> None:
    bootstrap = None
    if s.spec.mode != "null":
        bootstrap = Bootstrap(FAKE_BOOTSTRAP_HOST, s.spec.default_bootstrap_port, s.mint_room())
    request = GenerateRequest(
        rid=s.mint_id(name),
        input_ids=[0],
        sampling=SamplingParams(max_new_tokens=count, temperature=0.0, seed=0, ignore_eos=True),
        bootstrap=bootstrap,
        skip_cache_insert=True,
    )
    with s.client.generate([request], dp_rank=rank) as generation:
        await asyncio.wait_for(generation.collect(), timeout_s)
