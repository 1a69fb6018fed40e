"""Shared memory of one machine's ranks: a memfd, never left over.

leader:    region = SharedRegion.create(plan); start followers with its descriptor
follower:  region = SharedRegion.open(descriptor, plan)
"""

import mmap
import os
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.allreduce import allreduce
from engine.kernels.build import RANKS_ENDED, failure
from engine.parallel.region_plan import RegionPlan, new_memory

YIELDS = 50  # in a wait without the C kernel; then it sleeps
# As in allreduce.c:
LONGEST_SLEEP_S = 4e-3
SLEEP_SHARE = 16  # maximum sleep as a share of the wait so far

_fence = threading.Lock()


class SharedRegion:
    """Only the creator has a `descriptor`, to close. Tensors keep memory alive."""

    def __init__(
        self, memory: mmap.mmap, plan: RegionPlan, *, descriptor: int | None, ends_with: "SharedRegion | None" = None
    ) -> None:
        self.plan = plan
        self.descriptor = descriptor
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.abort_word: Tensor = self.word(plan.abort) if ends_with is None else ends_with.abort_word
        self._kernels = allreduce()

    @classmethod
    def create(cls, plan: RegionPlan, *, ends_with: "SharedRegion | None" = None) -> "SharedRegion":
        """Create zeroed memory, allocated at the first write; `ends_with` shares its abort word."""
        descriptor = new_memory(plan)
        return cls(mmap.mmap(descriptor, plan.size), plan, descriptor=descriptor, ends_with=ends_with)

    @classmethod
    def open(cls, descriptor: int, plan: RegionPlan, *, ends_with: "SharedRegion | None" = None) -> "SharedRegion":
        """`descriptor` may be closed afterwards. Raises ValueError for another plan's size."""
        size = os.fstat(descriptor).st_size
        if size != plan.size:
            raise ValueError(f"shared memory of ranks has {size} bytes; this plan's has {plan.size}: {plan}")
        return cls(mmap.mmap(descriptor, size), plan, descriptor=None, ends_with=ends_with)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        assert offset + size <= self.plan.size, (offset, shape, dtype)
        return self._memory[offset : offset + size].view(dtype).view(shape)

    def word(self, offset: int) -> Tensor:
        return self.tensor(offset, (1,), torch.int64)

    @property
    def aborted(self) -> bool:
        return bool(self.abort_word.item())

    def abort(self) -> None:
        """End all waits with RanksEnded, now and later."""
        self.abort_word[0] = 1

    def wait(self, word: Tensor, value: int) -> None:
        """Return once `word` is at least `value`, after earlier writes. Raises RanksEnded."""
        if self._kernels is not None:
            self._kernels.wait(word.data_ptr(), value, abort=self.abort_word.data_ptr())
            return
        start_s, looks = time.monotonic(), 0
        while int(word.item()) < value:
            if self.aborted:
                raise failure(RANKS_ENDED)
            looks += 1
            waited_s = time.monotonic() - start_s
            time.sleep(0 if looks < YIELDS else min(waited_s / SLEEP_SHARE, LONGEST_SLEEP_S))
        _all_before()

    def read(self, word: Tensor) -> int:
        value = int(word.item())
        _all_before()
        return value

    def publish(self, word: Tensor, value: int) -> None:
        """Set `word` after all earlier writes; it has one writer."""
        _all_before()
        word[0] = value

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _all_before() -> None:
    """Fence: a lock taken twice."""
    for _ in range(2):
        with _fence:
            pass


def late_ranks(region: SharedRegion) -> list[int]:
    """Ranks, by stage, that others wait for; call it after a timeout.

    A computing rank counts, too.
    """
    plan = region.plan
    for stage in reversed(range(plan.stages)):
        first = stage * plan.ranks
        for lines in (plan.sum_lines(stage), plan.gather_lines(stage)):
            counts = region.tensor(lines, (plan.ranks, 8), torch.int64)[:, 0].tolist()
            if behind := [first + i for i, count in enumerate(counts) if count < max(counts)]:
                return behind
        if stage == 0 or any(_waiting(region, stage - 1, rank) for rank in range(plan.ranks)):
            return list(range(first, first + plan.ranks))
    raise AssertionError("the first stage ends the loop")


def ranks_without_row(region: SharedRegion) -> list[int]:
    plan = region.plan
    posted = [region.read(region.word(plan.board_lines(rank))) for rank in range(plan.dp_ranks)]
    return [rank for rank, count in enumerate(posted) if count < max(posted)]


def _waiting(region: SharedRegion, stage: int, rank: int) -> bool:
    sent, taken = region.tensor(region.plan.link_lines(stage, rank), (2, 8), torch.int64)[:, 0].tolist()
    return bool(sent > taken)


# ---- Future map's tokens for other ranks: the leader writes, followers read.


class SharedTokens:
    """Last token per slot (`row` int64), and the leader's `count` of publications.

    `sampled`: sampled steps so far, on a follower. The leader overwrites a slot only after the
    steps that read it: a token needs the step that read the previous one.
    """

    def __init__(self, region: SharedRegion) -> None:
        self._region = region
        self.sampled = 0
        self._count = region.word(region.plan.tokens_count)
        self.row = region.tensor(region.plan.tokens, (region.plan.slots,), torch.int64)

    @property
    def count(self) -> int:
        return int(self._count.item())

    def publish(self, slots: Tensor | Sequence[int], tokens: Tensor | Sequence[int]) -> int:
        self.row[torch.as_tensor(slots, dtype=torch.int64)] = torch.as_tensor(tokens, dtype=torch.int64)
        count = self.count + 1
        self._region.publish(self._count, count)
        return count

    def wait(self, count: int) -> None:
        """Raises RanksEnded."""
        self._region.wait(self._count, count)
