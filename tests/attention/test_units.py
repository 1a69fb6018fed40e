"""Pages of several units: where each head lies, that attention computes the same bits, and that units fit any number of ranks."""

from itertools import product

import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.kv.cache_spec import CacheSpec, page_bytes_of
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    all_heads,
    filled_pool,
    make_pool,
    make_sequences,
    run_step,
    worst_error,
)

STARTS, ENDS = [0, 76, 40, 299, 0, 511], [50, 77, 90, 300, 1, 530]


@pytest.mark.parametrize("units", [1, 2, 4])
def test_each_head_lies_in_its_unit_in_the_order_of_a_page_of_one(units: int) -> None:
    specs = [CacheSpec(4, 16, "bfloat16"), CacheSpec(8, 24, "float32")]
    pool = KVPool(specs, num_pages=3, page_size=4, device="cpu", units=units)
    halves = [4 * spec.num_kv_heads // units * spec.row_bytes() for spec in specs]
    assert pool.layer_ends() == [2 * halves[0], pool.unit_bytes]
    assert pool.page_bytes == units * pool.unit_bytes == page_bytes_of(specs, 4, units=units)
    assert pool.unit_bytes % 64 == 0 and 0 <= pool.unit_bytes - 2 * sum(halves) < 64
    for layer, page, token in product(range(2), range(4), range(4)):
        of_unit = specs[layer].num_kv_heads // units
        for head in range(specs[layer].num_kv_heads):
            row = specs[layer].row_bytes()
            at = page * pool.page_bytes + head // of_unit * pool.unit_bytes + 2 * sum(halves[:layer])
            at += (token * of_unit + head % of_unit) * row
            for half, kept in enumerate((pool.k, pool.v)):
                found = kept(layer, head // of_unit)[page, token, head % of_unit]
                assert found.data_ptr() == pool.base_ptr + at + half * halves[layer]


@pytest.mark.parametrize("extend", [True, False], ids=["prompts", "decodes"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_attention_over_units_has_the_bits_of_one(name: str, dtype: str, extend: bool) -> None:
    """Also with more threads, which cut the heads of a request into more runs (torch's own bits depend on them)."""
    heads = Heads(q=16, kv=8, dim=64)
    ends = ENDS if extend else [start + 1 for start in STARTS]
    sequences = make_sequences(heads, ENDS, page_size=16, dtype=dtype)
    outs, kept = [], []
    try:
        for units, threads in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 3)):
            torch.set_num_threads(threads if name == "cpu" else 1)
            pool = filled_pool(heads, sequences, STARTS, units=units)
            backend = make_attention_backend(name, pool, num_heads=heads.q)
            outs.append(torch.cat(run_step(backend, sequences, STARTS, ends, page_size=16, extend=extend)))
            kept.append(all_heads(pool, 1))
    finally:
        torch.set_num_threads(1)
    by_request = list(outs[0].split([b - a for a, b in zip(STARTS, ends, strict=True)]))
    assert worst_error(by_request, sequences, STARTS, ends) < TOLERANCE[dtype]
    assert all(torch.equal(out, outs[0]) for out in outs) and all(torch.equal(each, kept[0]) for each in kept)


def test_flashinfer_refuses_units_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pool = make_pool(Heads(q=4, kv=2, dim=64), num_pages=1, page_size=16, dtype="bfloat16", units=2)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: .* 2 units.*triton"):
        make_attention_backend("flashinfer", pool, num_heads=4)


PAGES = {5: 2, 1: 7, 3: 3}  # a prompt's on the one side, and on the other


class Ranks:
    """The pools of `size` ranks, which hold `num_units` units of a model of 4 kv heads together."""

    def __init__(self, size: int, num_units: int) -> None:
        self.units = num_units // size
        spec = CacheSpec(num_kv_heads=4 // size, head_dim=6, dtype="bfloat16")
        self.pools = [KVPool([spec] * 3, num_pages=7, page_size=4, device="cpu", units=self.units) for _ in range(size)]

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> None:
        """Each rank its heads."""
        for rank, pool in enumerate(self.pools):
            heads = slice(rank * 4 // len(self.pools), (rank + 1) * 4 // len(self.pools))
            for layer in range(3):
                pool.write(layer, pages, offsets, k[layer, :, heads], v[layer, :, heads])

    def unit(self, page: int, number: int) -> torch.Tensor:
        """Bytes of unit `number` of the model."""
        rank, unit = divmod(number, self.units)
        pool = self.pools[rank]
        return pool.buffer.view(-1, pool.unit_bytes)[page * self.units + unit]


@pytest.mark.parametrize(("prefill", "decode"), list(product([1, 2, 4], repeat=2)))
def test_units_of_any_ranks_put_together_are_the_units_of_any_other(prefill: int, decode: int) -> None:
    num_units = max(prefill, decode)
    ours, theirs = Ranks(prefill, num_units), Ranks(decode, num_units)
    k, v = torch.randn(2, 3, 12, 4, 6)
    offsets = torch.arange(12) % 4
    ours.write(k, v, torch.tensor(list(PAGES)).repeat_interleave(4), offsets)
    for (mine, other), unit in product(PAGES.items(), range(num_units)):
        theirs.unit(other, unit).copy_(ours.unit(mine, unit))
    expected = Ranks(decode, num_units)
    expected.write(k, v, torch.tensor(list(PAGES.values())).repeat_interleave(4), offsets)
    for found, right in zip(theirs.pools, expected.pools, strict=True):
        assert torch.equal(found.buffer, right.buffer)
