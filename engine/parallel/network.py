"""Collectives of two machines without GPUs: each adds its ranks' partials over shared memory, TCP carries the subtotals.

Each machine has the same power of two of ranks, in order, so that its subtotal is a subtree of the sum over all: the bits are those of
one machine with as many ranks. Rank i of one machine exchanges with rank i of the other its slice of the subtotal.
"""

import torch
from torch import Tensor

from engine.parallel.collectives import SharedMemoryCollectives, columns_of
from engine.parallel.rank_connection import RankConnection
from engine.parallel.region import SharedRegion

NOTHING = -0.0  # added to any number, -0 included, it leaves that number


class NetworkCollectives:
    """`Collectives` of a rank on machine 0 or 1. No tape records them: Python moves bytes within a sum."""

    def __init__(self, region: SharedRegion, *, local_rank: int, machine: int, other: RankConnection) -> None:
        here = region.plan.ranks
        assert machine in (0, 1) and here & (here - 1) == 0, (machine, here)
        self.rank, self.size = machine * here + local_rank, 2 * here
        self._local = SharedMemoryCollectives(region, rank=local_rank)
        self._machine = machine
        self._other = other

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        subtotal = self._local.sum(partial, dtype=torch.float32).view(-1)
        mine = columns_of(self._local.rank, self._local.size, len(subtotal))
        own = subtotal[mine.start : mine.stop]
        total = torch.full_like(subtotal, NOTHING)
        total[mine.start : mine.stop] = own + self._other.swap(own)  # of two numbers order does not matter
        return self._local.sum(total.view(partial.shape), dtype=dtype)  # slices beside nothing

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        """The ranks' columns are those of `columns_of`."""
        mine = columns_of(self.rank, self.size, total)
        assert columns == mine, (columns, mine)
        whole = self._local.gather_columns(part, columns=columns, total=total)
        if whole is None:
            return None
        first = columns_of(self._local.size, self.size, total).start  # of machine 1's columns
        if self._machine:
            self._other.send(whole[:, first:].contiguous())
            return None
        theirs = torch.empty((len(part), total - first))
        self._other.receive(theirs)
        whole[:, first:] = theirs
        return whole

    def close(self) -> None:
        self._other.close()
        self._local.close()
