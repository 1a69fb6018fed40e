"""Pages to the host tier and back, byte for byte."""

import pytest
import torch

from engine.core.plan import PageCopy, Plan, PlanItem
from engine.kv.cache_spec import CacheSpec
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import KVPool


def test_pages_come_back_elsewhere_as_they_were() -> None:
    specs = [CacheSpec(num_kv_heads=2, head_dim=8, dtype="float32")] * 3
    pool = KVPool(specs, num_pages=9, page_size=4, device="cpu", units=2)
    pages = pool.buffer.view(10, -1)
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    was, host = pages.clone(), HostPool(pool, num_pages=6)
    out = [PageCopy(page=5, host_page=1), PageCopy(page=2, host_page=2), PageCopy(page=8, host_page=5)]
    host.copy(1, out=out, back=[])
    assert bytes(host.page(2)) == was[2].numpy().tobytes()
    pages.zero_()
    back = [PageCopy(page=9, host_page=1), PageCopy(page=4, host_page=2), PageCopy(page=1, host_page=5)]
    host.copy(2, out=[], back=back)
    expected = torch.zeros_like(was)
    expected[9], expected[4], expected[1] = was[5], was[2], was[8]
    assert torch.equal(pages, expected)


def test_what_goes_out_may_be_loaded_in_the_same_step() -> None:
    pool = small_pool()
    pages = pool.buffer.view(4, -1)
    pages[1] = 7
    HostPool(pool, num_pages=1).copy(1, out=[PageCopy(1, 0)], back=[PageCopy(2, 0)])
    assert torch.equal(pages[2], pages[1]) and int(pages[3].sum()) == 0


@pytest.mark.parametrize(
    ("start", "page_start", "guarded"),
    [(0, 0, [5, 6, 7]), (8, 0, [7]), (9, 0, [7]), (8, 2, [5, 6, 7]), (12, 0, [])],
)
def test_a_step_guards_the_pages_that_it_is_the_first_to_write(
    start: int, page_start: int, guarded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 4 tokens: what lies before `start` is read only."""
    host, seen = HostPool(small_pool(), num_pages=1), list[int]()
    monkeypatch.setattr(host._copies, "guard", seen.extend)
    host.begin(Plan(1, extend=True, items=[item(start=start, page_start=page_start, new_pages=[5, 6, 7])]))
    assert seen == guarded


def small_pool() -> KVPool:
    return KVPool([CacheSpec(num_kv_heads=1, head_dim=8, dtype="float32")], num_pages=3, page_size=4, device="cpu")


def item(*, start: int, page_start: int, new_pages: list[int]) -> PlanItem:
    return PlanItem("r", 0, [1], start, page_start, new_pages, sample=True, output_len=0, extend=True)
