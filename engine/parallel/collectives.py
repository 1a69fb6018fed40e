"""Collectives of TP ranks: sums of partial results, gathers of logits.

Every rank calls the same methods in the same order and shapes. Partials are added in float32 in one
binary tree, (0+1)+(2+3), and rounded once: equal bits on all ranks, for any place in the batch,
which gloo and NCCL do not promise.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.allreduce import SharedLines, allreduce
from engine.kernels.build import OUT_OF_STEP, failure
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import FLOAT_BYTES

TAKES = -(1 << 62)  # as in allreduce.c


class Collectives(Protocol):
    """Ranks of one stage; a call returns after all ranks made it.

    Raises RanksEnded once the group has ended.
    """

    rank: int
    size: int

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The sum of dense float32 `partial`s [T, n], as bfloat16 or float32."""
        ...

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        """float32[T, total] of all columns on rank 0, valid until the next gather; else
        None.
        """
        ...

    def share(self, x: Tensor, *, owner: int = 0) -> None:
        """Copy dense `x` [T, n] from rank `owner` to all."""
        ...

    def close(self) -> None: ...


class SingleRank:
    """The group of one rank, whose part is the whole."""

    rank, size = 0, 1

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        return partial.to(dtype)

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor:
        return part

    def share(self, x: Tensor, *, owner: int = 0) -> None: ...

    def close(self) -> None: ...


SINGLE_RANK = SingleRank()


def tree_sum(partials: list[Tensor]) -> Tensor:
    """Add neighbours pairwise, level by level."""
    while len(partials) > 1:
        pairs = [a + b for a, b in zip(partials[::2], partials[1::2], strict=False)]
        partials = pairs + partials[2 * len(pairs) :]
    return partials[0]


def columns_of(rank: int, size: int, total: int) -> range:
    return range(total * rank // size, total * (rank + 1) // size)


class SharedMemoryCollectives:
    """Collectives over shared memory for CPU ranks of a machine, one thread per rank.

    allreduce.c and its torch replacement have equal bits.
    """

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
        abort = region.abort_word.data_ptr()
        self._to_sum, self._to_gather = (
            SharedLines(lines.data_ptr(), abort, rank, self.size) for lines in (self._sum_lines, self._gather_lines)
        )

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        return self.sum_rows(partial, rows=range(len(partial)), dtype=dtype)

    def sum_rows(self, partial: Tensor, *, rows: range, dtype: torch.dtype) -> Tensor:
        """`rows` of `sum`, different per rank."""
        if self._kernels is not None:
            windows = self._windows.data_ptr()
            return self._kernels.sum(
                self._to_sum, partial, rows=rows, windows=windows, window=self._window, dtype=dtype
            )
        return self._sum_by_torch(partial, dtype)[rows.start : rows.stop]

    def gather_rows(self, part: Tensor, *, first: int, total: int) -> Tensor:
        """[total, n], the ranks' dense `part`s [T, n]; this rank's start at row `first`.

        Rows that no rank has stay undefined.
        """
        if self._kernels is not None:
            window = self._windows[0].numel() * FLOAT_BYTES
            windows = self._windows.data_ptr()
            return self._kernels.rows(self._to_sum, part, first=first, total=total, windows=windows, window=window)
        return self._gather_rows_by_torch(part, first, total)

    def take_rows(self, part: Tensor, *, first: int, total: int, wanted: Tensor) -> Tensor:
        """Rows `wanted` i64[N], different per rank, of all `part`s: all-to-all."""
        windows = self._windows[0].numel() * FLOAT_BYTES
        if self._kernels is not None:
            at = self._windows.data_ptr()
            return self._kernels.take(
                self._to_sum, part, first=first, total=total, wanted=wanted, windows=at, window=windows
            )
        return self._take_rows_by_torch(part, first, total, wanted)

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

    def share(self, x: Tensor, *, owner: int = 0) -> None:
        whole = self.gather_rows(x if self.rank == owner else x[:0], first=0, total=len(x))
        if self.rank != owner:
            x.copy_(whole)

    def close(self) -> None:
        """Close memory; waiting ranks need the region's abort()."""
        self._region.close()

    def _sum_by_torch(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        assert partial.dtype == torch.float32 and partial.is_contiguous(), (partial.dtype, partial.stride())
        flat = partial.view(-1)
        out = torch.empty(len(flat), dtype=dtype)
        for at in range(0, len(flat), self._window):
            piece = flat[at : at + self._window]
            windows = self._windows[self._written % 2, :, : len(piece)]
            windows[self.rank] = piece
            self._meet(len(flat) - at)
            out[at : at + len(piece)] = tree_sum(list(windows))
        return out.view(partial.shape)

    def _gather_rows_by_torch(self, part: Tensor, first: int, total: int) -> Tensor:
        width = part.shape[1]
        out = torch.empty((total, width), dtype=part.dtype)
        flat, brought = out.view(-1).view(torch.uint8), part.contiguous().view(-1).view(torch.uint8)
        begin = first * width * part.element_size()
        size = self._windows[0].numel() * FLOAT_BYTES
        for at in range(0, len(flat), size):
            piece = flat[at : at + size]
            window = self._windows[self._written % 2].view(-1).view(torch.uint8)[: len(piece)]
            start, stop = max(begin, at), min(begin + len(brought), at + len(piece))
            if start < stop:
                window[start - at : stop - at] = brought[start - begin : stop - begin]
            self._meet(at - len(flat))  # below 0: no sum
            piece.copy_(window)
        return out

    def _take_rows_by_torch(self, part: Tensor, first: int, total: int, wanted: Tensor) -> Tensor:
        out = part.new_empty((len(wanted), part.shape[1]))
        size = part.shape[1] * part.element_size()
        most = self._windows[0].numel() * FLOAT_BYTES // size
        for at in range(0, total, most):
            end = min(at + most, total)
            window = self._windows[self._written % 2].view(-1).view(torch.uint8)[: (end - at) * size]
            rows = window.view(part.dtype).view(end - at, -1)
            start, stop = max(first, at), min(first + len(part), end)
            if start < stop:
                rows[start - at : stop - at] = part[start - first : stop - first]
            self._meet(TAKES + at - total)
            here = ((wanted >= at) & (wanted < end)).nonzero().view(-1)
            out[here] = rows[wanted[here] - at]
        return out

    @property
    def _written(self) -> int:
        return int(self._sum_lines[self.rank][0].item())

    def _meet(self, numbers: int) -> None:
        own, count = self._sum_lines[self.rank], self._written
        own[1 + count % 2] = numbers
        self._region.publish(own[:1], count + 1)
        for line in self._sum_lines:
            self._region.wait(line[:1], count + 1)
            if line[1 + count % 2] != numbers:
                raise failure(OUT_OF_STEP)

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
