"""Expert parallelism: moves of tokens and expert outputs between ranks with whole experts.

Slots are expert places, numbered by rank. Each token has k slots, best first:

  slots [T, k] -> rows sorted by slot -> each rank computes a range -> outputs return, unsummed

A token's own rank sums in the token's order, for equal results on any ranks. Slot -1 is no rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.parallel.collectives import Collectives, SharedMemoryCollectives
from engine.parallel.network import NOTHING
from engine.parallel.process_groups import NcclCollectives
from engine.parallel.row_exchange import GroupRows, RowExchange, SharedMemoryRows

_R = TypeVar("_R", bound=Collectives)

# (rows [n, hidden] sorted by slot, row counts of own slots i64) -> float32[n, width]
Compute = Callable[[Tensor, Tensor], Tensor]


class Answered(NamedTuple):
    """Float32 `answers` [t, k, width] for own tokens `mine`; token counts of all slots."""

    answers: Tensor
    rows: Tensor
    mine: slice = slice(None)


class ExpertRows(ABC, Generic[_R]):
    recordable = False

    def __init__(self, ranks: _R) -> None:
        self._ranks = ranks

    def own_slots(self, slots: int) -> range:
        assert slots % self._ranks.size == 0, (slots, self._ranks.size)
        each = slots // self._ranks.size
        return range(each * self._ranks.rank, each * (self._ranks.rank + 1))

    @abstractmethod
    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int, recorded: bool) -> Answered:
        """Outputs for `own` [T, hidden], `slots` i64[T, k] of `total`. `recorded`: in a graph."""

    def whole(self, part: Tensor, tokens: int) -> Tensor:
        """[tokens, n] of all own tokens, from `part` [t, n] of those that had answers here."""
        return part


def expert_rows(collectives: Collectives, exchange: RowExchange | None) -> ExpertRows[Any]:
    if isinstance(exchange, SharedMemoryRows):
        return TakenRows(exchange.ranks, exchange)
    if isinstance(exchange, GroupRows):
        return SentRows(exchange.ranks, stage=exchange.stage, exchange=exchange)
    if isinstance(collectives, NcclCollectives):
        return SentRows(collectives, stage=collectives)
    return TakenRows(collectives) if isinstance(collectives, SharedMemoryCollectives) else SummedRows(collectives)


class TakenRows(ExpertRows[SharedMemoryCollectives]):
    """All-to-all over shared memory; without `exchange` all ranks have the same rows."""

    def __init__(self, ranks: SharedMemoryCollectives, exchange: SharedMemoryRows | None = None) -> None:
        super().__init__(ranks)
        self._exchange = exchange

    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int, recorded: bool) -> Answered:
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


class SummedRows(ExpertRows[Collectives]):
    """Sum over ranks with the same rows, zeros for other ranks' experts."""

    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int, recorded: bool) -> Answered:
        mine, (tokens, each) = self.own_slots(total), slots.shape
        flat = slots.reshape(-1)
        here = (flat >= mine.start) & (flat < mine.stop)
        order, own_rows = _sorted(torch.where(here, flat - mine.start, -1), len(mine))
        answers = compute(own.index_select(0, order // each), own_rows)
        partial = torch.empty_like(answers).index_copy_(0, order, answers).masked_fill_(~here.unsqueeze(1), NOTHING)
        found = self._ranks.sum(partial, dtype=torch.float32)
        return Answered(found.view(tokens, each, answers.shape[1]), _counts(flat, total))


class SentRows(ExpertRows[NcclCollectives]):
    """All-to-all over process groups, after DeepSeek's DeepEP; no row is dropped.

    Ranks with the same rows (`stage`) get answers for a share each.

      recorded  equal splits, without host syncs: all rows to every rank, room for k answers a
                token from each, in all the bytes of a sum over ranks
      others    what is needed; the host reads the lengths once a layer
    """

    recordable = True

    def __init__(self, ranks: NcclCollectives, *, stage: Collectives, exchange: GroupRows | None = None) -> None:
        super().__init__(ranks)
        self._stage, self._exchange = stage, exchange

    def answers(self, own: Tensor, slots: Tensor, compute: Compute, *, total: int, recorded: bool) -> Answered:
        share = self._share_of(len(own))
        mine = slice(share * self._stage.rank, share * (self._stage.rank + 1))
        x, wanted = _padded(own[mine], share), _padded(slots[mine], share, value=-1)
        if self._exchange is None:
            every = _padded(slots, share * self._ranks.size, value=-1)
        else:
            every = self._ranks.from_all(wanted)
        sent = _Sent(self._ranks, every, self.own_slots(total))
        known = _padded(own, len(every)) if self._exchange is None else None  # all rows, where a rank has them
        find = sent.equally if recorded else sent.as_needed
        found = find(x, known, compute).masked_fill_((wanted < 0).view(-1, 1), 0.0)
        answers = found.view(share, slots.shape[1], -1)[: len(own[mine])]
        return Answered(answers, _counts(every.view(-1), total), mine)

    def whole(self, part: Tensor, tokens: int) -> Tensor:
        if not isinstance(self._stage, NcclCollectives):
            return part
        return self._stage.from_all(_padded(part, self._share_of(tokens)))[:tokens]

    def _share_of(self, tokens: int) -> int:
        return -(-(tokens if self._exchange is None else self._exchange.most) // self._stage.size)


class _Sent:
    """One exchange: `every` i64[N, k], slots of all tokens, an equal part of each rank's."""

    def __init__(self, ranks: NcclCollectives, every: Tensor, own: range) -> None:
        self._ranks, self._own = ranks, own
        self._tokens, self._each = every.shape
        self._share = self._tokens // ranks.size
        self._slots = every.view(-1)
        here = (self._slots >= own.start) & (self._slots < own.stop)
        # Pairs of token and slot by slot, this rank's first.
        self._order, self._rows = _sorted(torch.where(here, self._slots - own.start, -1), len(own))

    def equally(self, x: Tensor, known: Tensor | None, compute: Compute) -> Tensor:
        """Own tokens' answers [share * k, width] for `x` [share, hidden]; `known`: all rows."""
        ranks, room = self._ranks, self._share * self._each
        rows = ranks.from_all(x) if known is None else known
        answers = compute(rows.index_select(0, self._order // self._each), self._rows)
        answers = torch.empty_like(answers).index_copy_(0, self._order, answers)
        came = ranks.to_all(answers, [room] * ranks.size, [room] * ranks.size)
        holders = self._holders().view(ranks.size, room)[ranks.rank].clamp(max=ranks.size - 1)
        return came.index_select(0, holders * room + torch.arange(room, device=x.device))

    def as_needed(self, x: Tensor, known: Tensor | None, compute: Compute) -> Tensor:
        ranks, rank, holders = self._ranks, self._ranks.rank, self._holders()
        needs = self._needs(holders)
        tokens, pairs = self._lengths(needs, holders)
        order = self._order[: sum(of_one[rank] for of_one in pairs)]
        of_rows = order // self._each
        if known is None:
            sent = needs.view(ranks.size, ranks.size, self._share)[:, rank].reshape(-1)
            chosen = sent.to(torch.uint8).argsort(stable=True, descending=True)[: sum(tokens[rank])] % self._share
            known = ranks.to_all(x[chosen], tokens[rank], [of_one[rank] for of_one in tokens])
            of_rows = (needs[rank].cumsum(0) - 1)[of_rows]
        answers = compute(known.index_select(0, of_rows), self._rows).index_select(0, order.argsort())
        came = ranks.to_all(answers, [of_one[rank] for of_one in pairs], pairs[rank])
        own = holders.view(ranks.size, -1)[rank]
        places = own.argsort(stable=True)[: len(came)]
        return came.new_empty((len(own), came.shape[1])).index_copy_(0, places, came)

    def _holders(self) -> Tensor:
        """The rank of each pair's slot, or `size`."""
        return torch.where(self._slots < 0, self._ranks.size, self._slots // len(self._own))

    def _needs(self, holders: Tensor) -> Tensor:
        """bool[size, N]: tokens that each rank needs."""
        needs = torch.zeros((self._tokens, self._ranks.size + 1), dtype=torch.bool, device=holders.device)
        return needs.scatter_(1, holders.view(self._tokens, self._each), True)[:, :-1].T

    def _lengths(self, needs: Tensor, holders: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """By token's rank, then by expert's rank: tokens that go, pairs that are answered."""
        size = self._ranks.size
        tokens = needs.view(size, size, self._share).sum(2).T
        holders = holders.view(size, -1)
        pairs = torch.zeros((size, size + 1), dtype=torch.int64, device=holders.device)
        pairs = pairs.scatter_add_(1, holders, torch.ones_like(holders))[:, :-1]
        go, come = torch.stack((tokens, pairs)).tolist()
        return go, come


def _padded(x: Tensor, rows: int, *, value: int = 0) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)), value=value)


def _sorted(slots: Tensor, total: int) -> tuple[Tensor, Tensor]:
    return torch.where(slots < 0, total, slots).argsort(stable=True), _counts(slots, total)


def _counts(slots: Tensor, total: int) -> Tensor:
    keys = torch.where(slots < 0, total, slots)
    counts = torch.zeros(total + 1, dtype=torch.int64, device=slots.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys))[:total]
