"""The memory that the ranks of one machine share: a memfd, which has no name, so that no two workers meet in it and nothing is
left behind, however its processes end.

    leader:    region = SharedRegion.create(plan); start followers with pass_fds=(region.descriptor,)
    follower:  region = SharedRegion.open(descriptor, plan)
"""

import mmap
import os
import threading
import time

import torch
from torch import Tensor

from engine.kernels.allreduce import allreduce
from engine.kernels.failures import RANKS_ENDED, failure
from engine.parallel.region_plan import RegionPlan, new_memory

YIELDS = 50  # of a wait without the C kernel; then it sleeps
# As in allreduce.c:
LONGEST_SLEEP_S = 4e-3
SLEEP_SHARE = 16  # a sleep is at most this part of the wait so far

_fence = threading.Lock()


class SharedRegion:
    """One mapping of the memory. `descriptor` is None where the region was opened: it is the creator's to close.

    The memory lives as long as a mapping or a descriptor does; tensors of it keep theirs.
    """

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
        """Make the memory, zeroed; pages take none before they are written. `ends_with`: has the abort word of both."""
        descriptor = new_memory(plan)
        return cls(mmap.mmap(descriptor, plan.size), plan, descriptor=descriptor, ends_with=ends_with)

    @classmethod
    def open(cls, descriptor: int, plan: RegionPlan, *, ends_with: "SharedRegion | None" = None) -> "SharedRegion":
        """Map the memory. The caller may close `descriptor` afterwards. Raises ValueError where it is not of this plan's size."""
        size = os.fstat(descriptor).st_size
        if size != plan.size:
            raise ValueError(f"shared memory of ranks has {size} bytes; this plan's has {plan.size}: {plan}")
        return cls(mmap.mmap(descriptor, size), plan, descriptor=None, ends_with=ends_with)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Dense `shape` at a byte offset."""
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
        """End every wait of every rank, now and later, with RanksEnded."""
        self.abort_word[0] = 1

    def wait(self, word: Tensor, value: int) -> None:
        """Return when `word` is `value` or more; what its writer wrote before is then seen. Raises RanksEnded."""
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
        """Return the value of `word`; what its writer wrote before is then seen."""
        value = int(word.item())
        _all_before()
        return value

    def publish(self, word: Tensor, value: int) -> None:
        """Let `word`, which has this one writer, be `value`, after all that was written before."""
        _all_before()
        word[0] = value

    def close(self) -> None:
        """Close the descriptor; the mapping stays while a tensor of it does."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _all_before() -> None:
    """A fence for processors that reorder loads and stores: a lock taken twice lets none pass."""
    for _ in range(2):
        with _fence:
            pass


def late_ranks(region: SharedRegion) -> list[int]:
    """Return the ranks, numbered stage by stage, that have handed over less than others wait for, or a stage that has all it needs.

    A rank that computes is late, too: call it once a step takes too long.
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
    """Return the DP ranks that have not posted a row that others have (engine/ranks/shared_board.py)."""
    plan = region.plan
    posted = [region.read(region.word(plan.board_lines(rank))) for rank in range(plan.dp_ranks)]
    return [rank for rank, count in enumerate(posted) if count < max(posted)]


def _waiting(region: SharedRegion, stage: int, rank: int) -> bool:
    """Whether hidden states wait to be taken from `stage`."""
    sent, taken = region.tensor(region.plan.link_lines(stage, rank), (2, 8), torch.int64)[:, 0].tolist()
    return bool(sent > taken)
