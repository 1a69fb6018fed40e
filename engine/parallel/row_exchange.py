"""DP attention: what the ranks of all DP ranks exchange for the layers that they compute together, the MLPs.

    DP rank 0  rows a b     gather ->  a b c          -> own part of the MLP ->  sum over all ranks  ->  a b
    DP rank 1  row  c                  on every rank                                                 ->  c

Ranks of one DP rank have the same rows: the first of them brings these. No rank reads a row of padding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.layout import Place


class RowExchange:
    """One rank's side. `ranks`: all of the worker."""

    def __init__(self, ranks: SharedMemoryCollectives, *, place: Place) -> None:
        assert (ranks.rank, ranks.size) == (place.mlp_rank, place.mlp_size), place
        self._ranks = ranks
        self._dp_rank = place.dp_rank
        self._brings = place.tp_rank == 0
        self._first = self._total = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Take the rows of each DP rank in the next forward, padding included. All ranks give the same."""
        self._first, self._total = sum(tokens[: self._dp_rank]), sum(tokens)

    def compute(self, own: Tensor, partial: Callable[[Tensor], Tensor]) -> Tensor:
        """[T, n] in `own`'s type: the rows of `own` [T, hidden] in the sum over all ranks of `partial`, float32, of all rows."""
        return self._sum(partial(self._gather(own)), own_rows=len(own), dtype=own.dtype)

    def _gather(self, own: Tensor) -> Tensor:
        """[all rows, n] of the `own` [T, n] of every DP rank."""
        part = own if self._brings else own[:0]
        return self._ranks.gather_rows(part, first=self._first, total=self._total)

    def _sum(self, partial: Tensor, *, own_rows: int, dtype: torch.dtype) -> Tensor:
        """[own_rows, n] `dtype`, of the sum of all ranks' `partial` [all rows, n] float32."""
        rows = range(self._first, self._first + own_rows)
        if dtype == torch.float16:
            return self._ranks.sum_rows(partial, rows=rows, dtype=torch.float32).to(dtype)
        return self._ranks.sum_rows(partial, rows=rows, dtype=dtype)
