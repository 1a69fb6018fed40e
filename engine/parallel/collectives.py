"""What ranks that hold parts of one model exchange while they compute: sums of partial results, and columns of logits.

Every rank calls the same methods in the same order with the same shapes. Order decides bits: partials are added in float32 in
one binary tree over ranks, (0+1)+(2+3), and rounded once, so every rank gets the same bits, and a row's do not depend on where it
stands in the batch. gloo and NCCL's rings cut the buffer among ranks and promise neither.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.allreduce import SharedLines, allreduce
from engine.kernels.failures import OUT_OF_STEP, failure
from engine.parallel.region import SharedRegion


class Collectives(Protocol):
    """The ranks of one stage. A call returns when all ranks made it; it raises RanksEnded (engine/kernels/failures.py) once the

    group has ended.
    """

    rank: int
    size: int

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        """[T, n] `dtype` (bfloat16 or float32): the sum of all ranks' `partial` [T, n] float32, dense."""
        ...

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        """On rank 0 [T, total] float32, of which each rank gave `part` [T, len(columns)], dense: shared memory, valid until the
        next gather. None on the others."""
        ...

    def close(self) -> None: ...


def tree_sum(partials: list[Tensor]) -> Tensor:
    """Add in the order of all implementations: neighbours, then neighbours of these; an odd last one waits for its turn."""
    while len(partials) > 1:
        pairs = [a + b for a, b in zip(partials[::2], partials[1::2], strict=False)]
        partials = pairs + partials[2 * len(pairs) :]
    return partials[0]


def columns_of(rank: int, size: int, total: int) -> range:
    """Where collectives need to know the other ranks' columns: those of layout.py's share of a vocabulary."""
    return range(total * rank // size, total * (rank + 1) // size)


class SharedMemoryCollectives:
    """Ranks of one machine on CPUs, over `region`: by allreduce.c, or without a compiler by torch, over the same words and with the
    same bits, so that ranks of both kinds may meet. One thread per rank calls it."""

    def __init__(self, region: SharedRegion, *, rank: int, stage: int = 0) -> None:
        plan = region.plan
        assert 0 <= rank < plan.ranks and 0 <= stage < plan.stages, (rank, stage, plan)
        self.rank, self.size = rank, plan.ranks
        self._region = region
        self._window = plan.window
        self._windows = region.tensor(plan.windows(stage), (2, self.size, plan.window), torch.float32)
        self._sum_lines, self._gather_lines = (
            region.tensor(offset, (self.size, 8), torch.int64)
            for offset in (plan.sum_lines(stage), plan.gather_lines(stage))
        )
        self._logits = region.tensor(plan.logits, (plan.logits_rows * plan.vocab,), torch.float32)
        self._kernels = allreduce()
        abort = region.word(plan.abort).data_ptr()
        self._to_sum, self._to_gather = (
            SharedLines(lines.data_ptr(), abort, rank, self.size) for lines in (self._sum_lines, self._gather_lines)
        )

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        if self._kernels is not None:
            return self._kernels.sum(
                self._to_sum, partial, windows=self._windows.data_ptr(), window=self._window, dtype=dtype
            )
        return self._sum_by_torch(partial, dtype)

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        rows = len(part)
        assert rows * total <= len(self._logits), f"{rows} x {total} logits in memory for {len(self._logits)}"
        assert part.shape[1] == len(columns) and columns.step == 1 and columns.stop <= total, (part.shape, columns)
        whole = self._logits[: rows * total].view(rows, total)
        if self._kernels is not None:
            self._kernels.gather(self._to_gather, part, whole=whole, first=columns.start)
        else:
            self._gather_by_torch(part, whole[:, columns.start : columns.stop])
        return whole if self.rank == 0 else None

    def close(self) -> None:
        """Let go of the memory; ranks that wait for this one need the region's abort()."""
        self._region.close()

    def _sum_by_torch(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        assert partial.dtype == torch.float32 and partial.is_contiguous(), (partial.dtype, partial.stride())
        flat, own = partial.view(-1), self._sum_lines[self.rank]
        out = torch.empty(len(flat), dtype=dtype)
        for at in range(0, len(flat), self._window):
            piece, count = flat[at : at + self._window], int(own[0].item())
            windows = self._windows[count % 2, :, : len(piece)]
            windows[self.rank] = piece
            own[1 + count % 2] = len(flat) - at
            self._region.publish(own[:1], count + 1)
            for line in self._sum_lines:
                self._region.wait(line[:1], count + 1)
                if line[1 + count % 2] != len(flat) - at:
                    raise failure(OUT_OF_STEP)
            out[at : at + len(piece)] = tree_sum(list(windows))
        return out.view(partial.shape)

    def _gather_by_torch(self, part: Tensor, place: Tensor) -> None:
        own, leader = self._gather_lines[self.rank], self._gather_lines[0]
        count = int(own[1].item()) + 1
        own[1] = count
        if self.rank == 0:
            self._region.publish(own[:1], count)
        self._region.wait(leader[:1], count)
        place.copy_(part)
        if self.rank:
            self._region.publish(own[:1], count)
            return
        for line in self._gather_lines[1:]:
            self._region.wait(line[:1], count)
