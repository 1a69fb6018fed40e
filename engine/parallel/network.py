"""Collectives of several machines without GPUs: each adds its ranks' partials over shared memory, TCP carries the subtotals.

There is a power of two of machines, each with the same power of two of ranks, in order, so that its subtotal is a subtree of the
sum over all: the bits are those of one machine with as many ranks. Rank i of a machine exchanges its slice of the subtotal with
rank i of another, in rounds: in round n with the machine whose number differs in bit n (recursive doubling), after which both
have the subtotal of a subtree of 2 ** (n + 1) machines.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.parallel.collectives import SharedMemoryCollectives, columns_of
from engine.parallel.rank_connection import RankConnection
from engine.parallel.region import SharedRegion

NOTHING = -0.0  # added to any number, -0 included, it leaves that number


class NetworkCollectives:
    """`Collectives` of a rank. No tape records them: Python moves bytes within a sum."""

    def __init__(
        self,
        region: SharedRegion,
        *,
        local_rank: int,
        machine: int,
        others: Sequence[RankConnection],
    ) -> None:
        """`others`: round by round."""
        here = region.plan.ranks
        assert 0 <= machine < 1 << len(others) and here & (here - 1) == 0, (machine, here, len(others))
        self.rank, self.size = machine * here + local_rank, here << len(others)
        self._local = SharedMemoryCollectives(region, rank=local_rank)
        self._machine = machine
        self._others = tuple(others)

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        subtotal = self._local.sum(partial, dtype=torch.float32).view(-1)
        mine = columns_of(self._local.rank, self._local.size, len(subtotal))
        own = subtotal[mine.start : mine.stop]
        for other in self._others:
            own = own + other.swap(own)  # of two numbers order does not matter
        total = torch.full_like(subtotal, NOTHING)
        total[mine.start : mine.stop] = own
        return self._local.sum(total.view(partial.shape), dtype=dtype)  # slices beside nothing

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        """The ranks' columns are those of `columns_of`. In round n a machine whose bit n is set hands over all that it has."""
        mine = columns_of(self.rank, self.size, total)
        assert columns == mine, (columns, mine)
        whole = self._local.gather_columns(part, columns=columns, total=total)
        if whole is None:
            return None
        for number, other in enumerate(self._others):
            if self._machine >> number & 1:
                theirs = self._columns_from(self._machine, number, total)
                other.send(whole[:, theirs.start : theirs.stop].contiguous())
                return None
            theirs = self._columns_from(self._machine + (1 << number), number, total)
            came = torch.empty((len(part), len(theirs)))
            other.receive(came)
            whole[:, theirs.start : theirs.stop] = came
        return whole

    def share(self, x: Tensor, *, owner: int = 0) -> None:
        """In round n the machines that have `x`, 2 ** n of them, send it to as many: from the first rank of one to that of another."""
        source, first = divmod(owner, self._local.size)
        apart = self._machine ^ source
        if apart == 0:
            self._local.share(x, owner=first)
        if self._local.rank == 0:
            for number, other in enumerate(self._others):
                if apart < 1 << number:
                    other.send(x)
                elif apart < 2 << number:
                    other.receive(x)
        if apart:
            self._local.share(x)

    def close(self) -> None:
        for other in self._others:
            other.close()
        self._local.close()

    def _columns_from(self, machine: int, number: int, total: int) -> range:
        """Return the columns of the ranks of 2 ** number machines, from `machine` on."""
        first, last = machine * self._local.size, (machine + (1 << number)) * self._local.size - 1
        return range(columns_of(first, self.size, total).start, columns_of(last, self.size, total).stop)
