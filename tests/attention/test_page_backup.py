"""Pages copied to the host and back, byte for byte."""

import pytest
import torch

from engine.core.plan import PageLoad, PageSave, Plan
from engine.kv.cache_spec import CacheSpec
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import KVPool
from engine.kv.page_backup import PageBackup


def plan_of(**copies: object) -> Plan:
    return Plan(seq=1, extend=False, items=[], **copies)  # type: ignore[arg-type]


def test_pages_come_back_elsewhere_as_they_were_when_they_were_saved() -> None:
    specs = [CacheSpec(num_kv_heads=2, head_dim=8, dtype="float32")] * 3
    pool = KVPool(specs, num_pages=9, page_size=4, device="cpu", units=2)
    pages = pool.buffer.view(10, -1)
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    was, backup = pages.clone(), PageBackup(HostPool(pool, num_pages=4))
    backup.run(plan_of(saves=[PageSave(7, [5, 2, 8]), PageSave(8, [1])]))
    pages.zero_()
    backup.run(plan_of(loads=[PageLoad(7, 1, [4, 9])], drops=[8]))
    expected = torch.zeros_like(was)
    expected[4], expected[9] = was[2], was[8]
    assert torch.equal(pages, expected)
    backup.run(plan_of(saves=[PageSave(9, [1, 2, 3, 4])]))  # all of the room
    with pytest.raises(AssertionError, match="room"):
        backup.run(plan_of(saves=[PageSave(10, [5])]))
    backup.run(plan_of(loads=[PageLoad(9, 3, [6])], saves=[PageSave(10, [5, 4, 9, 7])]))  # the room of what is loaded
    assert torch.equal(pages[6], was[2])
    with pytest.raises(KeyError):
        backup.run(plan_of(loads=[PageLoad(7, 0, [1, 2, 3])]))
    with pytest.raises(KeyError):
        backup.run(plan_of(drops=[8]))
