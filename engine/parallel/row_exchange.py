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
        self.ranks = ranks
        self._dp_rank = place.dp_rank
        self._brings = place.tp_rank == 0
        self.first = self._total = 0  # where the own rows begin among those of all
        self._own = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Take the rows of each DP rank in the next forward, padding included. All ranks give the same."""
        self.first, self._total = sum(tokens[: self._dp_rank]), sum(tokens)
        self._own = tokens[self._dp_rank]

    def compute(self, own: Tensor, partial: Callable[[Tensor], Tensor]) -> Tensor:
        """[T, n] in `own`'s type: the rows of `own` [T, hidden] in the sum over all ranks of `partial`, float32, of all rows."""
        rows = range(self.first, self.first + len(own))
        dtype = torch.float32 if own.dtype == torch.float16 else own.dtype
        return self.ranks.sum_rows(partial(self._gather(own)), rows=rows, dtype=dtype).to(own.dtype)

    def everywhere(self, own: Tensor) -> Tensor:
        """[all rows, n] of the `own` [T, n] i64 of every DP rank; -1 where a row is padding."""
        padding = torch.nn.functional.pad(own, (0, 0, 0, self._own - len(own)), value=-1)
        return self._gather(padding)

    def take(self, own: Tensor, wanted: Tensor) -> Tensor:
        """[len(wanted), n]: rows `wanted` [N] i64 of those of all DP ranks, of which this one has `own` [T, n]."""
        part = own if self._brings else own[:0]
        return self.ranks.take_rows(part, first=self.first, total=self._total, wanted=wanted)

    def _gather(self, own: Tensor) -> Tensor:
        """[all rows, n] of the `own` [T, n] of every DP rank."""
        part = own if self._brings else own[:0]
        return self.ranks.gather_rows(part, first=self.first, total=self._total)
