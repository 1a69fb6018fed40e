"""The GPUs' way to add and gather, over gloo: the same bits as the CPUs' tree, whether a message is small or large."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel import process_groups
from engine.parallel.process_groups import NcclCollectives
from tests.parallel.test_sums import one_by_one, partials_of

T = TypeVar("T")


class ThreadsMemory:
    """Buffers that the threads of a test share."""

    def __init__(self, ranks: int) -> None:
        self.peers = [torch.full((process_groups.SMALL_NUMBERS,), torch.nan) for _ in range(ranks)]
        self.passed = 0
        self._barrier = threading.Barrier(ranks, self._count, timeout=60)

    def barrier(self) -> None:
        self._barrier.wait()

    def _count(self) -> None:
        self.passed += 1


def run(ranks: int, work: Callable[[NcclCollectives], T], *, memory: ThreadsMemory | None) -> list[T]:
    store = dist.HashStore()

    def join(rank: int) -> T:
        group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        return work(NcclCollectives(group, memory=memory))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(join, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_small_and_large_sums_have_the_bits_of_the_tree(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "SMALL_NUMBERS", 100)
    memory = ThreadsMemory(ranks)
    sizes = [(1, 1), (4, 25), (1, 101), (7, 33)]  # two small ones, two that do not divide evenly
    steps = [partials_of(ranks, *size) for size in sizes]

    def work(c: NcclCollectives) -> list[Tensor]:
        return [c.sum(partials[c.rank], dtype=torch.bfloat16) for partials in steps]

    for seen in run(ranks, work, memory=memory):
        for partials, total in zip(steps, seen, strict=True):
            assert torch.equal(total, one_by_one(partials, torch.bfloat16))
    assert memory.passed == 4  # twice for each small one


def test_logits_are_gathered_and_all_sums_go_the_large_way_without_peer_memory() -> None:
    whole = torch.randn(3, 10)
    partials = partials_of(3, 2, 8)

    def work(c: NcclCollectives) -> tuple[Tensor | None, Tensor]:
        columns = range(10 * c.rank // 3, 10 * (c.rank + 1) // 3)
        part = whole[:, columns.start : columns.stop].contiguous()
        return c.gather_columns(part, columns=columns, total=10), c.sum(partials[c.rank], dtype=torch.float32)

    (leader, total), *others = run(3, work, memory=None)
    assert leader is not None and torch.equal(leader, whole)
    assert [gathered for gathered, _ in others] == [None, None]
    assert torch.equal(total, one_by_one(partials, torch.float32))


@pytest.mark.parametrize("owner", [0, 2])
def test_what_one_rank_has_is_on_all(owner: int) -> None:
    def work(c: NcclCollectives) -> list[int]:
        row = torch.arange(4) * (c.rank + 1)
        c.share(row, owner=owner)
        return row.tolist()

    assert run(3, work, memory=None) == [[0, owner + 1, 2 * owner + 2, 3 * owner + 3]] * 3
