"""The checksum of KV pages: what it is by its formula, and that no damage that memory or a link does escapes it."""

import random
import struct
from dataclasses import replace
from itertools import product

import pytest
import torch

from engine.kernels.triton.checksum import page_sums_kernel, sums_constants
from engine.kv.cache_spec import LAYER, TAIL, CacheSpec, KVShard, combine
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import PageChecksum
from tests.attention.triton.test_triton import check_compiled, own_directory  # noqa: F401 (a fixture of every test here)
from tests.sampler.sampler_cases import MASK, mix

ODD = 0x9E3779B97F4A7C15


def by_formula(pages: list[bytes]) -> int:
    """Of whole pages without padding: their words follow one another in the model's KV."""
    words = struct.unpack(f"<{sum(len(page) for page in pages) // 8}Q", b"".join(pages))
    return sum(mix(w + i * ODD) for i, w in enumerate(words, 1)) & MASK


@pytest.fixture(params=[1, 2])
def pool(request: pytest.FixtureRequest) -> KVPool:
    spec = CacheSpec(num_kv_heads=2, head_dim=4, dtype="bfloat16")
    return noise(KVPool([spec] * 2, num_pages=150, page_size=4, device="cpu", units=request.param))


def noise(pool: KVPool) -> KVPool:
    pool.buffer.copy_(torch.frombuffer(bytearray(random.Random(0).randbytes(pool.buffer.nbytes)), dtype=torch.uint8))
    return pool


def page(pool: KVPool, number: int) -> bytes:
    at = number * pool.page_bytes
    return bytes(pool.buffer[at : at + pool.page_bytes].numpy())


@pytest.mark.parametrize("count", [0, 1, 64, 65, 133])
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


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("units", [1, 2])
def test_bits_behind_the_last_token_of_a_page_do_not_count(units: int, fp8: bool) -> None:
    """Earlier owners left them, and ranks that hold the same units may differ in them. All other bits count."""
    spec = CacheSpec(num_kv_heads=2, head_dim=4, dtype="bfloat16", fp8=fp8)
    specs = [spec, spec, replace(spec, drafter=LAYER), replace(spec, drafter=TAIL)]
    pool = noise(KVPool(specs, num_pages=8, page_size=4, device="cpu", units=units))
    checksum, bits = PageChecksum(pool), pool.bits_of(3)
    right = checksum([3, 7], 7)()
    assert checksum([3, 7], 8)() == checksum([3, 7])() != right
    assert int((bits == 255).sum()) == 3 * spec.bytes_per_token() // units * 3 + spec.row_bytes()
    for byte in range(pool.page_bytes):
        counts = bool(bits[byte % pool.unit_bytes])
        for page, seen in ((7, counts), (3, byte % pool.unit_bytes // 8 < -(-pool.unit_end // 8))):
            pool.buffer[page * pool.page_bytes + byte] ^= 128
            assert (checksum([3, 7], 7)() != right) == seen, (page, byte)
            pool.buffer[page * pool.page_bytes + byte] ^= 128


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


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_ranks_compute_of_their_units_and_layers_adds_up(ranks: int, stages: int) -> None:
    """Units of 96 bytes a layer, so their padding depends on the stage. Of ranks beyond the units each pair holds the same."""
    spec, pages = CacheSpec(num_kv_heads=2, head_dim=6, dtype="bfloat16"), [3, 1, 4]
    whole = noise(KVPool([spec] * 4, num_pages=4, page_size=4, device="cpu", units=2))
    of_rank, of_stage, parts = 2 // min(ranks, 2), 4 // stages, {}
    for rank, stage in product(range(ranks), range(stages)):
        first = rank * 2 // ranks
        held = KVShard(range(first, first + of_rank), 2, range(stage * of_stage, (stage + 1) * of_stage), 4)
        specs = [replace(spec, num_kv_heads=of_rank)] * of_stage
        pool = noise(KVPool(specs, num_pages=4, page_size=4, device="cpu", units=of_rank))
        for layer, unit in product(range(of_stage), range(of_rank)):
            pool.k(layer, unit).copy_(whole.k(held.layers[layer], held.units[unit]))
            pool.v(layer, unit).copy_(whole.v(held.layers[layer], held.units[unit]))
        part = PageChecksum(pool, held=held)(pages)()
        assert part is not None and parts.setdefault(held, part) == part, "replicas differ"
    assert combine(parts.values()) == PageChecksum(whole)(pages)()


def test_its_kernel_compiles_for_sm_90_without_spills() -> None:
    """Of Qwen3-8B's pages. Numerics: triton_numerics.py."""
    signature = dict.fromkeys(["words_ptr", "rows_ptr", "keys_ptr", "sums_ptr"], "*i64")
    made = check_compiled(
        page_sums_kernel, signature, sums_constants(294912, 294912), aligned=[], num_warps=8, num_stages=3
    )
    assert "ld.global.v2.b64" in made.asm["ptx"], "loads are narrow"
    assert made.usage["REG"] <= 64, made.usage
