"""Ranks of a GPU that share memory, or all do not: torch's calls are stood in for, threads are ranks with a store each over one file."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from engine.parallel import process_groups
from engine.parallel.process_groups import SymmetricMemory

RANKS = 3


class Torch:
    """`fails`: what a rank raises, by rank and call. `crossed`: each sees the memory of another. `met`: ranks that entered."""

    def __init__(self, path: Path, fails: dict[tuple[int, str], Exception], *, crossed: bool = False) -> None:
        self.stores = [dist.FileStore(str(path), RANKS) for _ in range(RANKS)]  # each has a timeout of its own
        self.met: list[int] = []
        self._fails, self._crossed = fails, crossed
        self._ranks = threading.local()
        self._buffers: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(RANKS, timeout=20)

    def empty(self, count: int, **_: Any) -> Tensor:
        self._fail("empty")
        return torch.zeros(count)

    def rendezvous(self, own: Tensor, group: Any) -> Any:
        """As torch: each tells where its memory is, and waits for all."""
        self.met.append(group.rank())
        self._fail("rendezvous")
        self._buffers[group.rank()] = own
        store = self.stores[group.rank()]
        store.set(f"met {group.rank()}", "")
        store.wait([f"met {rank}" for rank in range(RANKS)])
        of = (lambda rank: (rank + 1) % RANKS) if self._crossed else (lambda rank: rank)
        return SimpleNamespace(
            get_buffer=lambda rank, *_: self._buffers[rank if rank == group.rank() else of(rank)],
            barrier=self._barrier.wait,
        )

    def join(self, rank: int) -> SymmetricMemory | None:
        self._ranks.own = rank
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: RANKS)
        votes = dist.PrefixStore("memory", self.stores[rank])
        return process_groups._shared_memory(group, torch.device("cpu"), votes, rank)

    def _fail(self, call: str) -> None:
        if (error := self._fails.get((self._ranks.own, call))) is not None:
            raise error


Joined = Callable[..., tuple[Torch, list[SymmetricMemory | None]]]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Joined:
    def join(fails: dict[tuple[int, str], Exception], **how: Any) -> tuple[Torch, list[SymmetricMemory | None]]:
        here = Torch(tmp_path / "store", fails, **how)
        monkeypatch.setattr(_symmetric_memory, "empty", here.empty)
        monkeypatch.setattr(_symmetric_memory, "rendezvous", here.rendezvous)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(RANKS)))
        with ThreadPoolExecutor(RANKS) as pool:
            return here, list(pool.map(here.join, range(RANKS)))

    return join


def test_ranks_that_can_share_memory(joined: Joined) -> None:
    here, found = joined({})
    assert sorted(here.met) == [0, 1, 2]
    for memory in found:
        assert memory is not None and [int(peer[0]) for peer in memory.peers] == [0, 1, 2]


@pytest.mark.parametrize("error", [RuntimeError("no peer access\nstack"), ImportError("no module"), MemoryError()])
def test_a_rank_without_memory_keeps_nobody_waiting(
    error: Exception, joined: Joined, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    here, found = joined({(1, "empty"): error})
    assert found == [None] * 3 and here.met == []
    why = str(error).split("\n")[0] or "MemoryError"
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"rank {rank}: small sums take NCCL's messages, too: rank 1 has no symmetric memory ({why})"
        for rank in range(3)
    ]


def test_a_rank_that_cannot_map_its_peers_is_not_waited_for_long(
    joined: Joined, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a GPU that its process does not see; the others' patience is over soon, and their own later."""
    monkeypatch.setattr(process_groups, "MAP_S", 0.05)
    here, found = joined({(2, "rendezvous"): ValueError("cuMemMap: invalid device")})
    assert found == [None] * 3 and sorted(here.met) == [0, 1, 2]
    assert "rank 0: small sums take NCCL's messages, too: rank 2 maps no memory of its peers (cuMemMap" in caplog.text
    assert all(store.timeout.total_seconds() > 60 for store in here.stores)


def test_memory_of_the_wrong_rank_is_not_taken(joined: Joined, caplog: pytest.LogCaptureFixture) -> None:
    assert joined({}, crossed=True)[1] == [None] * 3
    assert "is mapped, and holds what [0, 2, 0] wrote" in caplog.text
