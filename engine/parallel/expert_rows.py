"""Expert parallelism: moves of tokens and expert outputs between ranks with whole experts.

Slots are expert places, numbered by rank. Each token has k slots, best first:

  slots [T, k] -> rows sorted by slot -> each rank computes a range -> outputs return, unsummed

A token's own rank sums in the token's order, for the same results on any number of ranks. Slot -1
is no rank.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.parallel.collectives import Collectives, SharedMemoryCollectives
from engine.parallel.network import NOTHING
from engine.parallel.row_exchange import RowExchange

# (rows [n, hidden] sorted by slot, row counts of own slots i64) -> float32[n, width]
Compute = Callable[[Tensor, Tensor], Tensor]


class Answered(NamedTuple):
    """Own tokens' float32 `answers` [T, k, width]; token counts of all slots."""

    answers: Tensor
    rows: Tensor


class ExpertRows(Protocol):
    recordable: bool

    def own_slots(self, slots: int) -> range: ...

    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int) -> Answered:
        """Outputs for `own` [T, hidden] with `slots` i64[T, k] of `total`."""
        ...


def expert_rows(collectives: Collectives, exchange: RowExchange | None) -> ExpertRows:
    if exchange is not None:
        return TakenRows(exchange.ranks, exchange)
    return TakenRows(collectives) if isinstance(collectives, SharedMemoryCollectives) else SummedRows(collectives)


class TakenRows:
    """All-to-all over shared memory; without `exchange` all ranks have the same rows."""

    recordable = False

    def __init__(self, ranks: SharedMemoryCollectives, exchange: RowExchange | None = None) -> None:
        self._ranks = ranks
        self._exchange = exchange

    def own_slots(self, slots: int) -> range:
        return _share(slots, self._ranks)

    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int) -> Answered:
        exchange, (tokens, each) = self._exchange, slots.shape
        every = slots if exchange is None else exchange.everywhere(slots)
        order, rows = _sorted(every.reshape(-1), total)
        mine = self.own_slots(total)
        ends = rows.cumsum(0).tolist()
        first, end = ends[mine.start - 1] if mine.start else 0, ends[mine.stop - 1]
        of_rows = order[first:end] // each
        x = own.index_select(0, of_rows) if exchange is None else exchange.take(own, of_rows)
        places = torch.empty_like(order).index_copy_(
            0, order, torch.arange(len(order))
        )  # position of each output in sorted order
        answers = compute(x, rows[mine.start : mine.stop])
        begin = 0 if exchange is None else exchange.first * each
        wanted = places[begin : begin + tokens * each]
        found = self._ranks.take_rows(answers, first=first, total=ends[-1], wanted=wanted)
        return Answered(found.view(tokens, each, answers.shape[1]), rows)


class SummedRows:
    """Sum over ranks with the same rows, zeros for other ranks' experts, without host syncs."""

    recordable = True

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def own_slots(self, slots: int) -> range:
        return _share(slots, self._collectives)

    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int) -> Answered:
        mine, (tokens, each) = self.own_slots(total), slots.shape
        flat = slots.reshape(-1)
        here = (flat >= mine.start) & (flat < mine.stop)
        order, own_rows = _sorted(torch.where(here, flat - mine.start, -1), len(mine))
        answers = compute(own.index_select(0, order // each), own_rows)
        partial = torch.empty_like(answers).index_copy_(0, order, answers).masked_fill_(~here.unsqueeze(1), NOTHING)
        found = self._collectives.sum(partial, dtype=torch.float32)
        return Answered(found.view(tokens, each, answers.shape[1]), _sorted(flat, total)[1])


def _share(slots: int, ranks: Collectives) -> range:
    assert slots % ranks.size == 0, (slots, ranks.size)
    each = slots // ranks.size
    return range(each * ranks.rank, each * (ranks.rank + 1))


def _sorted(slots: Tensor, total: int) -> tuple[Tensor, Tensor]:
    keys = torch.where(slots < 0, total, slots)
    counts = torch.zeros(total + 1, dtype=torch.int64, device=slots.device).scatter_add_(0, keys, torch.ones_like(keys))
    return keys.argsort(stable=True), counts[:total]
