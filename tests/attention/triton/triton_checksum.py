"""The checksum of KV pages by its Triton kernel in the interpreter, beside torch's operators; run by triton_numerics.py."""

import torch

from engine.kernels.triton import checksum as triton_checksum
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import PageChecksum


def check_checksum() -> None:
    """Units of several spans, the last span and tile partly filled, and padding, which does not count."""
    triton_checksum.TILE, triton_checksum.SPAN = 64, 256
    spec = CacheSpec(num_kv_heads=6, head_dim=9, dtype="float32")
    pool = KVPool([spec], num_pages=9, page_size=31, device="cpu", units=2)
    pool.buffer.copy_(torch.randint(0, 256, pool.buffer.shape, dtype=torch.uint8))
    assert (pool.unit_end // 8) % 256 % 64, "no tile is partly filled"
    assert pool.unit_end // 8 < pool.unit_bytes // 8, "no unit is padded"
    checksum, by_kernel = PageChecksum(pool), PageChecksum(pool, page_sums=triton_checksum.page_sums)
    by_kernel.pages_at_a_time = 2
    for pages in ([], [9], [3, 1, 7, 2, 8]):
        assert by_kernel(pages)() == checksum(pages)()
