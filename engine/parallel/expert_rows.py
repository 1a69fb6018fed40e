"""Expert parallel: where tokens and the answers of their experts move between ranks that hold whole experts each.

Slots are the places of experts, numbered rank by rank; each rank has as many. A token takes some slots, best first:

    [T, k] slots of the tokens -> rows sorted by slot -> a rank's slots are a run of them -> answers, back to the tokens, still apart

No rank adds what another computed before the token's own rank has all of it: so a sum is in the token's order, on any number of
ranks. A slot of -1 is of a row that no rank has brought.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.parallel.collectives import Collectives, SharedMemoryCollectives
from engine.parallel.network import NOTHING
from engine.parallel.row_exchange import RowExchange

# (rows [n, hidden] sorted by slot, how many each of the own slots has [slots] i64) -> [n, width] float32
Compute = Callable[[Tensor, Tensor], Tensor]


class Answered(NamedTuple):
    """`answers` [T, k, width] float32 of the own tokens; `rows` [slots of all ranks] i64: tokens of all ranks that took each."""

    answers: Tensor
    rows: Tensor


class ExpertRows(Protocol):
    """`recordable`: graphs may record it."""

    recordable: bool

    def own_slots(self, slots: int) -> range:
        """Of `slots`, those that this rank holds."""
        ...

    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int) -> Answered:
        """Of the rows `own` [T, hidden], whose `slots` [T, k] i64 are among `total`; every rank computes those that it holds."""
        ...


def expert_rows(collectives: Collectives | None, exchange: RowExchange | None) -> ExpertRows:
    if exchange is not None:
        return TakenRows(exchange.ranks, exchange)
    assert collectives is not None, "one rank holds all experts"
    return TakenRows(collectives) if isinstance(collectives, SharedMemoryCollectives) else SummedRows(collectives)


class TakenRows:
    """Over memory that ranks share: an all-to-all. `exchange`: with DP attention; else all ranks have the same rows, and only answers move."""

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
        )  # of each answer among the sorted
        answers = compute(x, rows[mine.start : mine.stop])
        begin = 0 if exchange is None else exchange.first * each
        wanted = places[begin : begin + tokens * each]
        found = self._ranks.take_rows(answers, first=first, total=ends[-1], wanted=wanted)
        return Answered(found.view(tokens, each, answers.shape[1]), rows)


class SummedRows:
    """Over any collectives, where all ranks have the same rows: all are summed, with nothing in the place of those that a rank does not
    compute. Nothing waits for the host, and shapes do not depend on the routing."""

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
    """The places in `slots` in their order, -1 behind all; how many each of `total` slots has."""
    keys = torch.where(slots < 0, total, slots)
    counts = torch.zeros(total + 1, dtype=torch.int64, device=slots.device).scatter_add_(0, keys, torch.ones_like(keys))
    return keys.argsort(stable=True), counts[:total]
