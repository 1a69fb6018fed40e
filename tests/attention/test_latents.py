"""Latent attention: one vector of a token is K of all heads and, in part, V."""

import pytest

from engine.attention.backend import make_attention_backend
from engine.kv.kv_pool import CacheSpec, KVPool
from service.flags import ConfigError


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_backends_without_latents_are_refused(name: str) -> None:
    spec = CacheSpec(num_kv_heads=1, head_dim=48, dtype="bfloat16", latent=True)
    pool = KVPool([spec], num_pages=1, page_size=4, device="cpu")
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: has no latent attention.*; choose torch"):
        make_attention_backend(name, pool, num_heads=4)
