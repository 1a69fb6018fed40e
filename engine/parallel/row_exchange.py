"""DP attention: exchange of rows for the shared MLPs.

  DP rank 0  rows a b   gather -> a b c         -> own part of MLP -> sum over all ranks -> a b
  DP rank 1  row  c               on every rank                                         -> c

Ranks of one DP rank have the same rows; the first sends them. Padding is never read.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.layout import Place


class RowExchange:
    def __init__(self, ranks: SharedMemoryCollectives, *, place: Place) -> None:
        assert (ranks.rank, ranks.size) == (place.mlp_rank, place.mlp_size), place
        self.ranks = ranks
        self._dp_rank = place.dp_rank
        self._brings = place.tp_rank == 0
        self.first = self._total = 0  # offset of own rows among all
        self._own = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Set each DP rank's rows, with padding, for the next forward."""
        self.first, self._total = sum(tokens[: self._dp_rank]), sum(tokens)
        self._own = tokens[self._dp_rank]

    def compute(self, own: Tensor, partial: Callable[[Tensor], Tensor]) -> Tensor:
        """Own rows [T, n] of the sum over ranks of float32 `partial`."""
        rows = range(self.first, self.first + len(own))
        dtype = torch.float32 if own.dtype == torch.float16 else own.dtype
        return self.ranks.sum_rows(partial(self._gather(own)), rows=rows, dtype=dtype).to(own.dtype)

    def everywhere(self, own: Tensor) -> Tensor:
        """All DP ranks' `own` i64[T, n], -1 for padding."""
        padding = torch.nn.functional.pad(own, (0, 0, 0, self._own - len(own)), value=-1)
        return self._gather(padding)

    def take(self, own: Tensor, wanted: Tensor) -> Tensor:
        """Rows `wanted` i64[N] of all DP ranks' `own` [T, n]."""
        part = own if self._brings else own[:0]
        return self.ranks.take_rows(part, first=self.first, total=self._total, wanted=wanted)

    def _gather(self, own: Tensor) -> Tensor:
        part = own if self._brings else own[:0]
        return self.ranks.gather_rows(part, first=self.first, total=self._total)
