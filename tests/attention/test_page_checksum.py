"""The checksum of KV pages: what it is by its formula, and that no damage that memory or a link does escapes it."""

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from threading import Event

import pytest
import torch

from engine.kernels.checksum import checksum_kernel
from engine.kernels.triton.checksum import sums_constants, word_sums_kernel
from engine.kv import page_checksum
from engine.kv.cache_spec import LAYER, TAIL, CacheSpec, KVShard, combine
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import ODD, Concurrent, PageChecksum, WordSums, word_sums
from tests.attention.triton.test_triton import check_compiled, own_directory  # noqa: F401 (a fixture of every test here)
from tests.sampler.sampler_cases import MASK, mix

GOLDEN = 0x9E3779B97F4A7C15


@pytest.fixture(params=["C", "torch"])
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> WordSums:
    """Torch's in pieces of rows and of a row."""
    monkeypatch.setattr(page_checksum, "SCRATCH_WORDS", 50)
    return by_c() if request.param == "C" else word_sums


def by_c() -> WordSums:
    kernel = checksum_kernel()
    assert kernel is not None
    return kernel


def by_formula(pages: list[bytes]) -> int:
    """Of whole pages without padding: their words follow one another in the model's KV."""
    words = struct.unpack(f"<{sum(len(page) for page in pages) // 8}Q", b"".join(pages))
    return sum(mix(w + i * GOLDEN) for i, w in enumerate(words, 1)) & MASK


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
def test_it_is_the_formula(pool: KVPool, count: int, sums: WordSums) -> None:
    pages = random.Random(count).sample(range(1, 151), count)
    before, checksum = pool.buffer.clone(), PageChecksum(pool, sums=sums)
    assert checksum(pages)() & MASK == by_formula([page(pool, p) for p in pages])
    assert torch.equal(pool.buffer, before)


def test_any_flipped_bit_is_seen(pool: KVPool) -> None:
    checksum = PageChecksum(pool, sums=by_c())
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
    checksum, bits = PageChecksum(pool, sums=by_c()), pool.bits_of(3)
    right = checksum([3, 7], 7)()
    assert checksum([3, 7], 8)() == checksum([3, 7])() != right
    assert int((bits == 255).sum()) == 3 * spec.bytes_per_token() // units * 3 + spec.row_bytes()
    for byte in range(pool.page_bytes):
        counts = bool(bits[byte % pool.unit_bytes])
        for page, seen in ((7, counts), (3, byte % pool.unit_bytes // 8 < -(-pool.unit_end // 8))):
            pool.buffer[page * pool.page_bytes + byte] ^= 128
            assert (checksum([3, 7], 7)() != right) == seen, (page, byte)
            pool.buffer[page * pool.page_bytes + byte] ^= 128


def test_a_mask_that_repeats_in_a_unit_is_the_whole_one(pool: KVPool, sums: WordSums) -> None:
    bits = pool.bits_of(3)
    assert len(bits) < pool.unit_bytes
    checksum, copy = PageChecksum(pool, sums=sums), pool.buffer.clone().view(-1, pool.unit_bytes)
    words = pool.buffer.view(-1, pool.unit_bytes)
    expected = [checksum([3, 7], 7)(), checksum([3, 7])()]
    words[7 * pool.units : 8 * pool.units] &= bits.repeat(pool.unit_bytes // len(bits))
    assert [checksum([3, 7], 7)(), checksum([3, 7])()] == [expected[0]] * 2 != expected
    assert not torch.equal(words, copy)


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


Fault = Callable[[torch.Tensor, random.Random], None]  # of int64[page, word] that landed; page 0 is an older one


def _older_page(pages: torch.Tensor, rng: random.Random) -> None:
    pages[rng.randrange(1, len(pages))] = pages[0]


def _older_line(pages: torch.Tensor, rng: random.Random) -> None:
    page, at = rng.randrange(1, len(pages)), rng.randrange(0, pages.shape[1], 8)
    pages[page, at : at + 8] = pages[0, at : at + 8]


def _no_page(pages: torch.Tensor, rng: random.Random) -> None:
    pages[rng.randrange(1, len(pages))] = 0


def _one_page_twice(pages: torch.Tensor, rng: random.Random) -> None:
    source, target = rng.sample(range(1, len(pages)), 2)
    pages[target] = pages[source]


def _swapped_halves(pages: torch.Tensor, rng: random.Random) -> None:
    """Layers of a page in another order."""
    page, half = rng.randrange(1, len(pages)), pages.shape[1] // 2
    pages[page] = pages[page].roll(half)


def _moved_by_a_word(pages: torch.Tensor, rng: random.Random) -> None:
    pages[1:] = pages[1:].flatten().roll(rng.choice((-1, 1))).view_as(pages[1:])


def _like_changes_of_two_words(pages: torch.Tensor, rng: random.Random) -> None:
    """The same bit in both, which sums of words times odd numbers miss where it is the highest."""
    words = pages[1:].flatten()
    for at in rng.sample(range(len(words)), 2):
        words[at] ^= -(1 << 63)
    pages[1:] = words.view_as(pages[1:])


FAULTS = [
    _older_page,
    _older_line,
    _no_page,
    _one_page_twice,
    _swapped_halves,
    _moved_by_a_word,
    _like_changes_of_two_words,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_what_memory_and_links_do_is_seen(pool: KVPool, fault: Fault) -> None:
    """Each passes once in 2^64: of 300 none may."""
    rng, sent = random.Random(5), pool.buffer.clone()
    checksum, landed = PageChecksum(pool, sums=by_c()), pool.buffer.view(torch.int64).view(-1, pool.page_bytes // 8)
    for _ in range(300):
        pages = rng.sample(range(1, 151), 5)
        right, changed = checksum(pages[1:])(), landed[pages]
        fault(changed, rng)
        landed[pages] = changed
        assert checksum(pages[1:])() != right
        pool.buffer.copy_(sent)


def test_a_large_sum_is_computed_in_a_thread_and_a_small_one_at_once(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, gate, woken = by_c(), Event(), Event()

    def waits(*args: object) -> torch.Tensor:
        assert gate.wait(30)
        return kernel(*args)  # type: ignore[arg-type]

    pages, right = [3, 1, 4], PageChecksum(pool)([3, 1, 4])()
    concurrent = Concurrent(woken.set)
    assert PageChecksum(pool, sums=kernel, later=concurrent)(pages)() == right and not woken.is_set()
    monkeypatch.setattr(page_checksum, "INLINE_BYTES", 1)
    late = PageChecksum(pool, sums=waits, later=concurrent)(pages)
    assert late() is None
    gate.set()
    assert woken.wait(30) and late() == right


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


@pytest.mark.parametrize(("word", "period"), [("i64", 0), ("i64", 4096), ("i32", 0), ("i16", 0)])
def test_its_kernel_compiles_for_sm_90_without_spills(word: str, period: int) -> None:
    """Of Qwen3-8B's pages. Numerics: triton_numerics.py."""
    signature = dict.fromkeys(["words_ptr", "starts_ptr", "keys_ptr", "bits_ptr", "sums_ptr"], "*i64")
    signature["words_ptr"] = f"*{word}"
    constants = sums_constants(294912, ODD, word_bytes=int(word[1:]) // 8, period=period)
    made = check_compiled(
        word_sums_kernel, signature, constants, aligned=["words_ptr", "bits_ptr"], num_warps=8, num_stages=3
    )
    assert word != "i64" or "ld.global.v2.b64" in made.asm["ptx"], "loads are narrow"
    assert made.usage["REG"] <= 80, made.usage
