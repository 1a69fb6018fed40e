"""Pages to the host tier and back, byte for byte; the path of a CUDA device on a CPU, too (its copies are ordinary ones)."""

import pytest
import torch

from engine.core.plan import PageCopy, Plan
from engine.kv import host_pool
from engine.kv.host_pool import HostPool, runs
from engine.kv.kv_pool import CacheSpec, KVPool


def test_runs_of_neighbours_are_found() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [(0, 4, 3), (3, 2, 1), (4, 9, 2)]
    assert list(runs([])) == []


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("staging_bytes", [1, 64 << 20])
def test_pages_come_back_elsewhere_as_they_were(
    staged: bool, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "STAGING_BYTES", staging_bytes)
    specs = [CacheSpec(num_kv_heads=2, head_dim=8, dtype="float32")] * 3
    pool = KVPool(specs, num_pages=9, page_size=4, device="cpu")
    pages = pool.buffer.view(10, -1)
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    was, host = pages.clone(), HostPool(pool, num_pages=6)
    monkeypatch.setattr(host, "_on_cpu", not staged)
    out = [PageCopy(page=5, host_page=1), PageCopy(page=2, host_page=2), PageCopy(page=8, host_page=5)]
    host.run(Plan(seq=1, extend=False, items=[], to_host=out))
    assert bytes(host.page(2)) == was[2].numpy().tobytes()
    pages.zero_()
    back = [PageCopy(page=9, host_page=1), PageCopy(page=4, host_page=2), PageCopy(page=1, host_page=5)]
    host.run(Plan(seq=2, extend=False, items=[], from_host=back))
    expected = torch.zeros_like(was)
    expected[9], expected[4], expected[1] = was[5], was[2], was[8]
    assert torch.equal(pages, expected)


def test_what_goes_out_may_be_loaded_in_the_same_step() -> None:
    pool = KVPool([CacheSpec(num_kv_heads=1, head_dim=8, dtype="float32")], num_pages=3, page_size=4, device="cpu")
    pages = pool.buffer.view(4, -1)
    pages[1] = 7
    plan = Plan(seq=1, extend=False, items=[], to_host=[PageCopy(1, 0)], from_host=[PageCopy(2, 0)])
    HostPool(pool, num_pages=1).run(plan)
    assert torch.equal(pages[2], pages[1]) and int(pages[3].sum()) == 0
