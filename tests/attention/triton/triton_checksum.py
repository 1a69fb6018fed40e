"""Checksums by their Triton kernel in the interpreter, beside torch's operators; run by triton_numerics.py."""

import torch

from engine.kernels.triton import checksum as triton_checksum
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import PageChecksum, StateChecksum
from engine.kv.state_pool import StatePool, StateSpec


def check_checksum() -> None:
    """Units of several spans, the last span and tile partly filled, and padding, which does not count; words of states."""
    triton_checksum.TILE, triton_checksum.SPAN = 64, 256
    spec = CacheSpec(num_kv_heads=6, head_dim=9, dtype="float32")
    pool = KVPool([spec], num_pages=9, page_size=31, device="cpu", units=2)
    states = StatePool([StateSpec((40, 3), (4, 9, 5), "bfloat16")] * 2, num_slots=2, device="cpu")
    for buffer in (pool.buffer, states.buffer):
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
    assert (pool.unit_end // 8) % 256 % 64, "no tile is partly filled"
    assert pool.unit_end // 8 < pool.unit_bytes // 8, "no unit is padded"
    checksum, by_kernel = PageChecksum(pool), PageChecksum(pool, sums=triton_checksum.triton_sums)
    for pages in ([], [9], [3, 1, 7, 2, 8]):
        for num_tokens in (None, 12):
            assert by_kernel(pages, num_tokens)() == checksum(pages, num_tokens)()
    of_state = StateChecksum(states, layers=range(2), sums=triton_checksum.triton_sums)
    assert of_state(2)() == StateChecksum(states, layers=range(2))(2)()
