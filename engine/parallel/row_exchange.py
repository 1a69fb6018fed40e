"""DP attention: exchange of rows for the shared MLPs.

  DP rank 0  rows a b   gather -> a b c         -> own part of MLP -> sum over all ranks -> a b
  DP rank 1  row  c               on every rank                                         -> c

Ranks of one DP rank have the same rows. Padding is never read.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.parallel.collectives import Collectives, SharedMemoryCollectives, columns_of
from engine.parallel.layout import Place
from engine.parallel.process_groups import JointGroups, NcclCollectives


class RowExchange(Protocol):
    """`ranks`: of all DP ranks."""

    @property
    def ranks(self) -> Collectives: ...

    def begin(self, tokens: Sequence[int]) -> None:
        """Set each DP rank's rows, with padding, for the next forward."""

    def begin_equal(self, rows: int) -> None:
        """Set the same number of rows on all DP ranks, as in recorded steps."""

    def compute(self, own: Tensor, partial: Callable[[Tensor], Tensor]) -> Tensor:
        """Own rows [T, n] of the sum over ranks of float32 `partial`."""
        ...


class _Rows:
    def __init__(self, place: Place) -> None:
        self._dp_rank, self._dp_size = place.dp_rank, place.dp_size
        self._tokens: Sequence[int] = [0] * place.dp_size

    def begin(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def begin_equal(self, rows: int) -> None:
        self._tokens = [rows] * self._dp_size

    @property
    def first(self) -> int:
        return sum(self._tokens[: self._dp_rank])

    @property
    def own(self) -> int:
        return self._tokens[self._dp_rank]

    @property
    def total(self) -> int:
        return sum(self._tokens)

    @property
    def most(self) -> int:
        return max(self._tokens)


class SharedMemoryRows(_Rows):
    """`RowExchange` of CPU ranks. The first rank of each DP rank sends its rows."""

    def __init__(self, ranks: SharedMemoryCollectives, *, place: Place) -> None:
        assert (ranks.rank, ranks.size) == (place.mlp_rank, place.mlp_size), place
        super().__init__(place)
        self.ranks = ranks
        self._brings = place.tp_rank == 0

    def compute(self, own: Tensor, partial: Callable[[Tensor], Tensor]) -> Tensor:
        rows = range(self.first, self.first + len(own))
        return self.ranks.sum_rows(partial(self._gather(own)), rows=rows, dtype=_sums_in(own)).to(own.dtype)

    def everywhere(self, own: Tensor) -> Tensor:
        """All DP ranks' `own` i64[T, n], -1 for padding."""
        return self._gather(pad(own, (0, 0, 0, self.own - len(own)), value=-1))

    def take(self, own: Tensor, wanted: Tensor) -> Tensor:
        """Rows `wanted` i64[N] of all DP ranks' `own` [T, n]."""
        part = own if self._brings else own[:0]
        return self.ranks.take_rows(part, first=self.first, total=self.total, wanted=wanted)

    def _gather(self, own: Tensor) -> Tensor:
        part = own if self._brings else own[:0]
        return self.ranks.gather_rows(part, first=self.first, total=self.total)


class GroupRows(_Rows):
    """`RowExchange` of GPU ranks, whose calls graphs may record: rows are equal there.

    Rank i of each DP rank exchanges rows with rank i of the others. Ranks of one DP rank (`stage`)
    add a part of its sums each, in `tree_sum`'s order, and gather them rounded.
    """

    def __init__(self, groups: JointGroups, *, stage: Collectives, place: Place) -> None:
        super().__init__(place)
        self.ranks = NcclCollectives(groups.ranks, memory=groups.memory)
        assert (self.ranks.rank, self.ranks.size) == (place.mlp_rank, place.mlp_size), place
        self._across = NcclCollectives(groups.across, memory=None)
        self.stage = stage

    def compute(self, own: Tensor, partial: Callable[[Tensor], Tensor]) -> Tensor:
        sums = partial(self._gather(own))
        size, width = self.stage.size, sums.shape[1]
        lengths = [len(columns_of(rank, size, rows * width)) for rows in self._tokens for rank in range(size)]
        piece = self.ranks.sum_pieces(sums, lengths, dtype=_sums_in(own))
        if isinstance(self.stage, NcclCollectives):
            piece = self.stage.join_pieces(piece, total=self.own * width)
        return piece.view(self.own, width)[: len(own)].to(own.dtype)

    def _gather(self, own: Tensor) -> Tensor:
        rows = pad(own, (0, 0, 0, self.own - len(own)))
        if len(set(self._tokens)) == 1:
            return self._across.from_all(rows)
        return self._across.to_all(rows.repeat(self._dp_size, 1), [self.own] * self._dp_size, self._tokens)


def _sums_in(own: Tensor) -> torch.dtype:
    return torch.float32 if own.dtype == torch.float16 else own.dtype
