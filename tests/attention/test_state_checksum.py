"""The checksum of recurrent states: the same however ranks cut them, and another one for any damage."""

import random

import pytest
import torch

from engine.kernels.checksum import checksum_kernel
from engine.kv import page_checksum
from engine.kv.cache_spec import CacheSpec, CopiesDiffer, KVShard, StateShard, combine, total
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import StateChecksum, word_sums
from engine.kv.state_pool import StatePool, StateSpec
from engine.ranks.rank_checksum import RankChecksum, alone
from engine.ranks.rank_parts import RankPools

WHOLE = StateSpec((8, 3), (4, 2, 5), "bfloat16")


def noise(buffer: torch.Tensor, seed: int) -> None:
    data = bytearray(random.Random(seed).randbytes(buffer.nbytes))
    buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))


def model_of(num_layers: int) -> StatePool:
    pool = StatePool([WHOLE] * num_layers, num_slots=2, device="cpu")
    noise(pool.buffer, 0)
    return pool


def part_of(model: StatePool, layers: range, channels: tuple[range, ...], heads: range) -> StatePool:
    held = StateShard(channels, 8, heads, 4)
    spec = StateSpec((sum(map(len, channels)), 3), (len(heads), 2, 5), "bfloat16", held)
    pool = StatePool([spec] * len(layers), num_slots=3, device="cpu")
    noise(pool.buffer, 1)
    for i, layer in enumerate(layers):
        conv = model.conv(layer)[2]
        pool.conv(i)[3] = torch.cat([conv[part.start : part.stop] for part in channels])
        pool.recurrent(i)[3] = model.recurrent(layer)[2][heads.start : heads.stop]
    return pool


def test_ranks_that_share_channels_have_the_checksum_of_one() -> None:
    """Channels 6 and 7 lie on both ranks of a stage, as those that groups of Mamba2 share."""
    model = model_of(3)
    right = StateChecksum(model, layers=range(3))(2)()
    assert right is not None
    found = []
    for layers in (range(1), range(1, 3)):
        for channels, heads in (((range(3), range(6, 8)), range(1)), ((range(3, 6), range(6, 8)), range(1, 4))):
            found.append(StateChecksum(part_of(model, layers, channels, heads), layers=layers)(3)())
    parts = [part for part in found if part is not None]
    assert len(parts) == 4 and total(parts) == combine(right.values())
    name = sorted(set(parts[0]) & set(parts[1]))[0]
    with pytest.raises(CopiesDiffer, match=name):
        total([parts[0], {**parts[1], name: parts[1][name] + 1}])


@pytest.mark.parametrize("by", ["C", "torch"])
def test_any_flipped_bit_of_a_state_is_seen_and_no_other_byte(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kernel = model_of(2), checksum_kernel()
    assert kernel is not None
    right = StateChecksum(pool, layers=range(2))(1)()
    monkeypatch.setattr(page_checksum, "SCRATCH_WORDS", 7)
    checksum = StateChecksum(pool, layers=range(2), sums=kernel if by == "C" else word_sums)
    assert right is not None and checksum(1)() == right
    of_state = {at + i for _, at, size in pool.runs(range(2)) for i in range(size)}
    for byte in range(pool.slot_bytes):
        pool.buffer[pool.slot_bytes + byte] ^= 1
        assert (checksum(1)() != right) == (byte in of_state)
        pool.buffer[pool.slot_bytes + byte] ^= 1


@pytest.mark.parametrize("which", ["pages", "windows", "states"])
def test_damage_in_any_pool_is_seen(which: str) -> None:
    spec = CacheSpec(num_kv_heads=2, head_dim=4, dtype="bfloat16")
    kv, windows = (KVPool([spec] * n, num_pages=4, page_size=4, device="cpu") for n in (1, 2))
    states = model_of(1)
    for seed, pool in enumerate((kv, windows)):
        noise(pool.buffer, seed)
    held = KVShard(range(1), 1, range(3), 3, range(1), 1)
    checksum = alone(RankChecksum(RankPools(kv=kv, held=held, states=states, windows=windows)))
    right = checksum([1, 2], [[2], [3, 4]], None)()
    buffer = {"pages": kv.buffer, "windows": windows.buffer, "states": states.buffer}[which]
    for asked in ([1], [2]):
        pages = {"pages": [1, 2], "windows": [3, 4], "states": [2]}[which]
        at = pages[(asked[0] - 1) % len(pages)] * (buffer.nbytes // {"pages": 5, "windows": 5, "states": 3}[which])
        buffer[at] ^= 1
        assert checksum([1, 2], [[2], [3, 4]], None)() != right
        buffer[at] ^= 1
    assert checksum([1, 2], [[2], [3, 4]], None)() == right
    assert checksum([1, 2], [[2], [4, 3]], None)() != right and checksum([1, 2], [[1], [3, 4]], None)() != right
