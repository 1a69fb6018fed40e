"""Internal requests for /health_generate and warm-up, through scheduler and model.

Disaggregated roles use the fake bootstrap server, so no KV is transferred. An encoder worker
encodes a small image.
"""

import asyncio

from engine.flags.images import blank_image
from engine.frontend.services import Services
from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap, GenerateRequest
from engine.sampling_params import SamplingParams

IMAGE_TOKENS = 4


async def compute_tokens(s: Services, count: int, *, name: str, timeout_s: float | None) -> None:
    """Compute on every DP rank. Raises ApiError, TimeoutError."""
    await asyncio.gather(*(_compute(s, count, r, name=name, timeout_s=timeout_s) for r in range(s.leaders.num_ranks)))


async def _compute(s: Services, count: int, rank: int, *, name: str, timeout_s: float | None) -> None:
    request = _image(s, name) if s.spec.mode == "encode" else _prompt(s, count, name)
    with s.client.generate([request], dp_rank=rank) as generation:
        await asyncio.wait_for(generation.collect(), timeout_s)


def _prompt(s: Services, count: int, name: str) -> GenerateRequest:
    bootstrap = None
    if s.spec.mode != "null":
        bootstrap = Bootstrap(FAKE_BOOTSTRAP_HOST, s.spec.default_bootstrap_port, s.mint_room())
    return GenerateRequest(
        rid=s.mint_id(name),
        input_ids=[0],
        sampling=SamplingParams(max_new_tokens=count, temperature=0.0, seed=0, ignore_eos=True),
        bootstrap=bootstrap,
        skip_cache_insert=True,
    )


def _image(s: Services, name: str) -> GenerateRequest:
    assert s.model.vision is not None, "the scheduler of an encode worker has loaded a tower"
    image = blank_image(s.model.vision, IMAGE_TOKENS)
    return GenerateRequest(
        rid=s.mint_id(name),
        input_ids=[0] * image.num_tokens,
        sampling=SamplingParams(max_new_tokens=0, temperature=0.0, seed=0),
        skip_cache_insert=True,
        alone=True,
        images=[image],
    )
