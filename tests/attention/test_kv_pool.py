from dataclasses import replace

import pytest
import torch

from engine.kv.cache_spec import LAYER, TAIL, CacheSpec, page_bytes_of, unit_parts
from engine.kv.kv_pool import KVPool, like_layers
from engine.kv.pool_memory import DeviceBytes


def bf16(kv_heads: int = 2, head_dim: int = 16) -> CacheSpec:
    return CacheSpec(num_kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16")


def fp32(kv_heads: int = 1, head_dim: int = 8) -> CacheSpec:
    return CacheSpec(num_kv_heads=kv_heads, head_dim=head_dim, dtype="float32")


def test_page_is_one_run_layer_after_layer_k_then_v():
    pool = KVPool([bf16()] * 3, num_pages=5, page_size=4, device="cpu")
    half = 4 * 2 * 16 * 2
    assert pool.page_bytes == 3 * 2 * half and pool.buffer.nbytes == 6 * pool.page_bytes
    for layer in range(3):
        assert pool.k(layer).shape == pool.v(layer).shape == (6, 4, 2, 16)
        assert pool.k(layer)[2].data_ptr() == pool.base_ptr + 2 * pool.page_bytes + layer * 2 * half
        assert pool.v(layer)[2].data_ptr() == pool.k(layer)[2].data_ptr() + half
        assert pool.k(layer)[3].is_contiguous()


def test_write_lands_at_page_and_offset_and_nowhere_else():
    pool = KVPool([bf16(), bf16()], num_pages=3, page_size=4, device="cpu")
    k = torch.randn(2, 2, 16)
    v = torch.randn(2, 2, 16)
    pool.write(1, torch.tensor([3, 1]), torch.tensor([0, 2]), k, v)
    assert torch.equal(pool.k(1)[3, 0], k[0].bfloat16()) and torch.equal(pool.v(1)[1, 2], v[1].bfloat16())
    written = (pool.buffer.view(torch.bfloat16) != 0).sum()
    assert written == (k.bfloat16() != 0).sum() + (v.bfloat16() != 0).sum()
    assert not pool.k(0).any()


def test_page_bytes_are_padded_and_mixed_dtypes_stay_aligned():
    specs = [bf16(kv_heads=1, head_dim=3), fp32(), bf16()]
    pool = KVPool(specs, num_pages=2, page_size=1, device="cpu")
    assert pool.page_bytes % 64 == 0 and pool.page_bytes == page_bytes_of(specs, 1)
    at = torch.tensor([1]), torch.tensor([0])
    for layer, spec in enumerate(specs):
        x = torch.full((1, spec.num_kv_heads, spec.head_dim), float(layer + 1))
        pool.write(layer, *at, x, -x)
    for layer in range(3):
        assert (pool.k(layer)[1] == layer + 1).all() and (pool.v(layer)[1] == -layer - 1).all()
        assert pool.k(layer).data_ptr() % pool.k(layer).itemsize == 0


def test_a_latent_is_kept_once_and_read_as_v_too():
    latent = CacheSpec(num_kv_heads=1, head_dim=48, dtype="bfloat16", latent=32)
    pool = KVPool([latent, latent], num_pages=2, page_size=4, device="cpu")
    assert latent.bytes_per_token() == 96 and pool.page_bytes == 2 * 4 * 96
    assert pool.layer_ends() == [384, 768]
    new = torch.randn(1, 1, 48)
    pool.write(1, torch.tensor([2]), torch.tensor([3]), new, torch.zeros_like(new))
    assert torch.equal(pool.k(1)[2, 3], new[0].bfloat16()) and pool.v(1).data_ptr() == pool.k(1).data_ptr()


FP8 = CacheSpec(num_kv_heads=2, head_dim=16, dtype="bfloat16", fp8=True)
DRAFTER = [replace(bf16(kv_heads=4), drafter=LAYER), CacheSpec(1, 24, "bfloat16", drafter=TAIL)]


LATENT = CacheSpec(num_kv_heads=1, head_dim=48, dtype="bfloat16", latent=32)
MOVED: dict[str, tuple[list[CacheSpec], int, int]] = {  # layers, units, runs of even rows
    "layers": ([bf16()] * 3, 1, 1),
    "units": ([bf16(4)] * 3, 4, 1),
    "fp8 in units": ([FP8, FP8], 2, 1),
    "latents": ([LATENT] * 3, 1, 1),
    "a drafter like the layers": ([bf16(4), *DRAFTER], 2, 1),
    "a drafter of another kind": ([fp32(2), FP8, FP8, *DRAFTER], 2, 3),
    "uneven layers": ([bf16(kv_heads=1, head_dim=3), fp32(), fp32()], 1, 2),
}


@pytest.mark.parametrize(("specs", "units", "runs"), MOVED.values(), ids=MOVED)
def test_moved_tokens_lie_in_both_places_and_all_else_as_before(specs: list[CacheSpec], units: int, runs: int) -> None:
    """As if all had been written there; a place is read that another token comes to."""
    came, went = [(1, 3), (4, 0), (2, 2)], [(4, 0), (3, 1), (1, 0)]
    pools = [KVPool(specs, num_pages=4, page_size=5, device="cpu", units=units) for _ in range(2)]
    rng = torch.Generator().manual_seed(0)
    for part in (pools[0], pools[0].drafter):
        for layer, spec in enumerate(part.specs if part is not None else ()):
            new = [torch.randn(3, spec.num_kv_heads, spec.head_dim, generator=rng) for _ in range(2)]
            for pool, written in zip(pools, ((came,), (came, went)), strict=True):
                own = pool if part is pools[0] else pool.drafter
                for at in written:
                    own.write(layer, *torch.tensor(at).T, *new)
    for pool in pools:
        if pool.tails is not None:
            pool.tails.fill_(7.0)
    pools[0].move(*torch.tensor(came).T, *torch.tensor(went).T)
    assert torch.equal(pools[0].buffer, pools[1].buffer)
    assert len(like_layers(unit_parts(specs, units), 5)) == runs


def test_new_memory_is_zero_and_untouched_memory_is_not_resident():
    before = _resident_bytes()
    pool = KVPool([fp32(8, 128)] * 4, num_pages=20000, page_size=16, device="cpu")
    assert pool.buffer.nbytes > 9 << 30
    assert not pool.k(3)[777].any()
    assert _resident_bytes() - before < 64 << 20


def _resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_the_pool_lies_in_the_memory_that_it_is_given():
    asked = []

    def allocate(size_bytes: int, device: torch.device) -> torch.Tensor:
        asked.append((size_bytes, device.type))
        return memory[:size_bytes]

    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    pool = KVPool([bf16()], num_pages=3, page_size=4, device="cpu", allocate=allocate)
    assert asked == [(4 * pool.page_bytes, "cpu")] and pool.base_ptr == memory.data_ptr()


def test_a_gpu_s_memory_is_described_as_bytes_that_may_be_written():
    described = DeviceBytes(0x7A0000000000, 4096).__cuda_array_interface__
    assert described == {"shape": (4096,), "typestr": "|u1", "data": (0x7A0000000000, False), "version": 3}
