"""The checksum of KV pages: what it is by its formula, and that no damage that memory or a link does escapes it."""

import random
import struct

import pytest
import torch

from engine.kernels.triton_checksum import page_sums_kernel, sums_constants
from engine.kv.kv_pool import CacheSpec, KVPool
from engine.kv.page_checksum import PageChecksum
from tests.attention.test_triton import check_compiled, own_directory  # noqa: F401 (a fixture of every test here)
from tests.sampler.sampler_cases import MASK, mix

ODD = 0x9E3779B97F4A7C15


def by_formula(pages: list[bytes]) -> int:
    total = 0
    for number, page in enumerate(pages, 1):
        words = struct.unpack(f"<{len(page) // 8}Q", page)
        total += mix(sum(mix(w + i * ODD) for i, w in enumerate(words, 1)) + number * ODD)
    return total & MASK


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(
        [CacheSpec(num_kv_heads=1, head_dim=4, dtype="bfloat16")] * 2, num_pages=150, page_size=4, device="cpu"
    )
    pool.buffer.copy_(torch.frombuffer(bytearray(random.Random(0).randbytes(pool.buffer.nbytes)), dtype=torch.uint8))
    return pool


def page(pool: KVPool, number: int) -> bytes:
    at = number * pool.page_bytes
    return bytes(pool.buffer[at : at + pool.page_bytes].numpy())


@pytest.mark.parametrize("count", [0, 1, 2, 64, 65, 133])
def test_it_is_the_formula(pool: KVPool, count: int) -> None:
    pages = random.Random(count).sample(range(1, 151), count)
    before, checksum = pool.buffer.clone(), PageChecksum(pool)
    checksum.pages_at_a_time = 64
    assert checksum(pages)() & MASK == by_formula([page(pool, p) for p in pages])
    assert torch.equal(pool.buffer, before)


def test_any_flipped_bit_is_seen(pool: KVPool) -> None:
    checksum = PageChecksum(pool)
    pages = [3, 1, 7]
    right = checksum(pages)()
    for byte in range(pool.page_bytes):
        for bit in (0, 7):
            pool.buffer[7 * pool.page_bytes + byte] ^= 1 << bit
            assert checksum(pages)() != right
            pool.buffer[7 * pool.page_bytes + byte] ^= 1 << bit
    assert checksum(pages)() == right
    pool.buffer[: pool.page_bytes] ^= 255  # a page that is not asked for
    assert checksum(pages)() == right


def test_swapped_pages_swapped_words_and_paired_sign_bits_are_seen(pool: KVPool) -> None:
    checksum = PageChecksum(pool)
    right = checksum([1, 2])()
    assert checksum([2, 1])() != right
    words = pool.buffer.view(torch.int64).view(-1, pool.page_bytes // 8)
    words[1, 0], words[1, 1] = words[1, 1].clone(), words[1, 0].clone()
    assert checksum([1, 2])() != right
    words[1, 0], words[1, 1] = words[1, 1].clone(), words[1, 0].clone()
    words[1, :2] ^= -(1 << 63)
    assert checksum([1, 2])() != right


def test_its_kernel_compiles_for_sm_90_without_spills() -> None:
    """Of Qwen3-8B's pages. Numerics: triton_numerics.py."""
    signature = dict.fromkeys(["words_ptr", "pages_ptr", "sums_ptr"], "*i64")
    made = check_compiled(page_sums_kernel, signature, sums_constants(294912), aligned=[], warps=8, stages=3)
    assert "ld.global.v2.b64" in made.asm["ptx"], "loads are narrow"
    assert made.usage["REG"] <= 64, made.usage
