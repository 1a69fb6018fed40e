"""Drafter passes behind the last known tokens, each one token further.

With topk above 1 drafts form a tree: each pass extends the topk most probable paths by topk tokens
each (EAGLE-2, arXiv:2406.16858). Their entries lie behind the known tokens, path by path, until
overwritten by a model step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, CapturableBackend
from engine.core.plan import Guess, PlanItem
from engine.executor.image_pass import rope_positions
from engine.executor.step_part import PagedPool, StepInputs
from engine.kv.step_batch import DeviceStep, PageTable, StepBatch, TreePaths, to_host, upload
from engine.models.draft_model import DraftEntries, DraftModel
from engine.parallel.collectives import Collectives
from engine.sampler.sampler import CapturableSampler, TokenSampler
from engine.speculative.futures import DraftedInputs, DraftFutures


class Drafted(NamedTuple):
    """Candidates of a pass. `of`: the item of each row, -1 for rows whose request has ended.

    `table` float32 [n, columns_of]: tokens and confidences [width, topk] behind each path; then in
    trees the chosen candidates, numbered per item. The first pass has one path.
    """

    of: Sequence[int]
    table: Tensor
    width: int
    topk: int

    def on_host(self) -> "Drafted":
        """A copy, on CUDA valid after the step's event."""
        return self._replace(table=to_host(self.table))


def columns_of(width: int, topk: int) -> int:
    return (2 * width + (topk > 1)) * topk


def guesses_of(passes: Sequence[Drafted]) -> dict[int, list[Guess]]:
    """Candidates by item, from passes on the host."""
    guesses: dict[int, list[Guess]] = {}
    parents: dict[int, list[int]] = {}  # of the next pass's paths
    for one in passes:
        both = one.width * one.topk
        for i, row in zip(one.of, one.table.tolist(), strict=True):
            if i < 0:
                continue
            found, above = guesses.setdefault(i, []), parents.get(i, [-1])
            parents[i] = [len(found) + int(path) for path in row[2 * both :] or (0,)]
            found += [Guess(int(row[at]), above[at // one.topk], row[both + at]) for at in range(both)]
    return guesses


class Tails:
    """Features of each page's newest token, an input of the drafter's next entry.

    `rows` [1 + num_pages, units, size] are equal in each unit.
    """

    def __init__(self, rows: Tensor, page_table: PageTable) -> None:
        self._rows = rows
        self._page_table = page_table

    def before(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Features [n, size] before `positions`; zero for the first token."""
        pages, _ = self._page_table.locate(slots, (positions - 1).clamp_min(0))
        return self._rows[pages, 0].masked_fill((positions == 0)[:, None], 0)

    def write(self, pages: Tensor, features: Tensor) -> None:
        """Keep `features` [n, size] for `pages` [n] int64."""
        self._rows[pages] = features[:, None].to(self._rows.dtype)


class KnownRows(NamedTuple):
    """Requests that draft, as planned, [n] int64 each: `ids` may be placeholders.

    Of `unverified` drafts in flight those that count add to `starts` and `output_lens`. `deltas`: of
    RoPE. `passes`: as of PlanItem.to_draft.
    """

    ids: Tensor
    slots: Tensor
    starts: Tensor
    deltas: Tensor
    output_lens: Tensor
    unverified: Tensor
    passes: Tensor


def known_rows(items: Sequence[PlanItem]) -> list[tuple[int, ...]]:
    """Fields of KnownRows for each item."""
    return [
        (i.tokens[0], i.slot, i.start, i.images.rope_delta if i.images else 0, i.output_len, i.unverified, i.to_draft)
        for i in items
    ]


@dataclass(frozen=True, slots=True)
class DraftPaths:
    """Input of a pass: equally many draft paths per request; rows go by request, then path.

    `slots`, `starts`, `output_lens` of the first pass and RoPE `turns` are [n] int64. Of each
    path's newest token: `ids` [n, paths] int64, `hidden` [n * paths, size]; `scores` [n, paths] are
    log confidences, `places` [n, paths, drafts] int64 their entries. `topk` paths continue.
    """

    slots: Tensor
    starts: Tensor
    output_lens: Tensor
    turns: Tensor
    ids: Tensor
    hidden: Tensor | None
    scores: Tensor
    places: Tensor
    topk: int

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def only(self, at: Tensor) -> "DraftPaths":
        """Paths of the requests `at`."""
        hidden = self.hidden
        if hidden is not None:
            hidden = hidden.reshape(-1, self.width, *hidden.shape[1:])[at].flatten(0, 1)
        slots, starts, output_lens, turns, ids, scores, places = (
            x[at] for x in (self.slots, self.starts, self.output_lens, self.turns, self.ids, self.scores, self.places)
        )
        return DraftPaths(slots, starts, output_lens, turns, ids, hidden, scores, places, self.topk)

    def of_rows(self, x: Tensor) -> Tensor:
        """`x` [n] for each path."""
        return x if self.width == 1 else x.repeat_interleave(self.width)

    def extended(self, tokens: Tensor, chosen: Tensor, out: Tensor, *, scores: Tensor, places: Tensor) -> "DraftPaths":
        """Paths `chosen` [n, topk] of `tokens` [n, paths, topk], with `out` [n * paths, size]."""
        above = chosen // self.topk
        hidden = None
        if self.hidden is not None:
            first = torch.arange(len(self.slots), device=above.device)[:, None] * self.width
            hidden = out[(first + above).flatten()]
        return replace(
            self,
            ids=tokens.flatten(1).gather(1, chosen),
            hidden=hidden,
            scores=scores,
            places=places.gather(1, above[:, :, None].expand(-1, -1, places.shape[2])),
        )


class DraftParts(NamedTuple):
    """`pools`: KV of all layers, the first with the drafter's; `backend`: for these.

    `sampler`: on the rank that samples. `collectives`: of the model's ranks. `inputs`: of steps.
    """

    pools: Sequence[PagedPool]
    backend: AttentionBackend
    sampler: TokenSampler | None
    collectives: Collectives
    inputs: StepInputs

    @property
    def futures(self) -> DraftFutures | None:
        return self.inputs.futures if isinstance(self.inputs, DraftedInputs) else None


class PassRows(NamedTuple):
    """Rows of pass `number`: [n * paths] int64 each. `tree`: places of earlier drafts."""

    number: int
    slots: Tensor
    pages: Tensor
    offsets: Tensor
    tree: TreePaths | None


class PassLengths(Protocol):
    """Lengths on the host or on the device."""

    def begin(self, rows: PassRows) -> None:
        """Prepare attention."""

    def guess(self, logits: Tensor, rows: PassRows) -> Tensor:
        """Sample tokens [n * paths] int64."""


class Passes:
    """A drafter's passes. `tails` is for drafters that read them."""

    def __init__(self, parts: DraftParts, tails: Tails | None) -> None:
        self._page_table, self._tails = parts.pools[0].page_table, tails
        self._backend, self._collectives = parts.backend, parts.collectives
        self._samples, self._inputs, self._futures = parts.sampler is not None, parts.inputs, parts.futures

    def known(self, rows: KnownRows, *, topk: int) -> DraftPaths:
        """The newest tokens as paths, behind drafts in flight that count."""
        ids, slots, starts, output_lens = rows.ids, rows.slots, rows.starts, rows.output_lens
        if self._futures is not None:
            more = self._futures.accepted(slots, starts, rows.unverified)
            ids, starts, output_lens = self._inputs.recorded(ids), starts + more, output_lens + more
            self._futures.forget_drafts(slots)
        return DraftPaths(
            slots=slots,
            starts=starts,
            output_lens=output_lens,
            turns=starts + rows.deltas,
            ids=ids[:, None],
            hidden=None if self._tails is None else self._tails.before(slots, starts),
            scores=torch.zeros(len(slots), 1, device=slots.device),
            places=starts.new_empty(len(slots), 1, 0),
            topk=topk,
        )

    def run(
        self, drafter: DraftModel, paths: DraftPaths, number: int, lengths: PassLengths
    ) -> tuple[Tensor, DraftPaths]:
        """Compute the newest tokens; return the table of Drafted, and the next paths."""
        own, places = self._own_places(paths, number), paths.places
        if paths.topk > 1 and number:
            places = torch.cat((places, own[:, :, None]), 2)
        slots, positions = paths.of_rows(paths.slots), paths.of_rows(paths.turns + number)
        tree = _mapping(paths, places) if paths.topk > 1 and number else None
        rows = PassRows(number, slots, *self._page_table.locate(slots, own.flatten()), tree)
        lengths.begin(rows)
        out = drafter.forward(DraftEntries(paths.ids.flatten(), paths.hidden, positions), self._backend.attend)
        tokens, confidences = self._guesses(drafter, out, paths, rows, lengths)
        if paths.topk == 1:
            if self._futures is not None:
                self._futures.keep_drafts(number + 1, paths.slots, tokens[:, 0, 0])
            table = torch.cat((tokens[:, 0].float(), confidences[:, 0]), 1)
            return table, replace(paths, ids=tokens[:, 0], hidden=None if paths.hidden is None else out)
        best = (paths.scores[:, :, None] + confidences.log()).flatten(1).topk(paths.topk, 1)
        table = torch.cat((tokens.flatten(1).float(), confidences.flatten(1), best.indices.float()), 1)
        return table, paths.extended(tokens, best.indices, out, scores=best.values, places=places)

    def _own_places(self, paths: DraftPaths, number: int) -> Tensor:
        """Entry places [n, paths] of pass `number`; the known token's is its own."""
        behind = 1 + (number - 1) * paths.topk if number else 0
        first = paths.starts[:, None] + behind
        return first if paths.width == 1 else first + torch.arange(paths.width, device=first.device)

    def _guesses(
        self, drafter: DraftModel, out: Tensor, paths: DraftPaths, rows: PassRows, lengths: PassLengths
    ) -> tuple[Tensor, Tensor]:
        """Best tokens [n, paths, topk] int64 and float32 confidences from `out`, on all ranks."""
        logits, best = drafter.logits(out), torch.zeros(2, len(out), paths.topk, device=out.device)
        if self._samples:
            assert logits is not None, "the rank that samples has all logits"
            self._sample(logits, rows, lengths, into=best)
        best = self._collectives.sum(best.flatten(0, 1), dtype=torch.float32).view_as(best)
        shape = len(paths.slots), paths.width, paths.topk
        return best[0].to(torch.int64).view(shape), best[1].view(shape)

    def _sample(self, logits: Tensor, rows: PassRows, lengths: PassLengths, *, into: Tensor) -> None:
        """Sample topk distinct tokens `into` [2, rows, topk]: float32 tokens and confidences."""
        total = logits.logsumexp(1, keepdim=True)
        topk = into.shape[2]
        for rank in range(topk):
            tokens = lengths.guess(logits, rows)[:, None]
            into[0, :, rank : rank + 1] = tokens
            into[1, :, rank : rank + 1] = (logits.gather(1, tokens) - total).exp()
            if rank + 1 < topk:
                logits = logits.scatter(1, tokens, -torch.inf)


def _mapping(paths: DraftPaths, places: Tensor) -> TreePaths:
    starts = paths.of_rows(paths.starts + 1)
    return TreePaths(starts=starts.to(torch.int32), places=places.flatten(0, 1).to(torch.int32))


class _HostLengths:
    def __init__(self, parts: DraftParts, items: Sequence[PlanItem]) -> None:
        self._parts, self._items = parts, items

    def begin(self, rows: PassRows) -> None:
        count = len(rows.slots)
        width = count // len(self._items)
        self._parts.backend.begin(
            StepBatch(
                extend=False,
                q_lens=[1] * count,
                kv_lens=[item.kv_len + rows.number for item in self._items for _ in range(width)],
                page_table=self._parts.pools[0].page_table.rows,
                slots=rows.slots,
                token_pages=rows.pages,
                token_offsets=rows.offsets,
                drafted=frozenset(row for row in range(count) if row % width),
                paths=rows.tree,
            )
        )

    def guess(self, logits: Tensor, rows: PassRows) -> Tensor:
        assert self._parts.sampler is not None, "the rank that samples has one"
        of_rows = [item for item in self._items for _ in range(len(rows.slots) // len(self._items))]
        lens = [item.output_len + rows.number for item in of_rows]
        return self._parts.sampler.guess(logits, [item.slot for item in of_rows], lens)


class DeviceLengths:
    """`output_lens` [n]: of the pass over `paths`; may be NOT_SAMPLED."""

    def __init__(self, parts: DraftParts, paths: DraftPaths, output_lens: Tensor) -> None:
        self._parts, self._paths, self._output_lens = parts, paths, output_lens

    def begin(self, rows: PassRows) -> None:
        backend = self._parts.backend
        assert isinstance(backend, CapturableBackend), "it reads no lengths on the host"
        backend.begin_on_device(
            DeviceStep(
                page_table=self._parts.pools[0].page_table.rows,
                slots=rows.slots,
                kv_lens=self._paths.of_rows(self._paths.starts + (1 + rows.number)).to(torch.int32),
                token_pages=rows.pages,
                token_offsets=rows.offsets,
                paths=rows.tree,
            )
        )

    def guess(self, logits: Tensor, rows: PassRows) -> Tensor:
        sampler = self._parts.sampler
        assert isinstance(sampler, CapturableSampler), "it reads no lengths on the host"
        return sampler.sample_on_device(logits, rows.slots, self._paths.of_rows(self._output_lens))[0]


class DraftSteps:
    """Passes that are launched one by one."""

    def __init__(self, parts: DraftParts, passes: Passes) -> None:
        self._parts, self._passes = parts, passes
        self._device = parts.pools[0].page_table.device
        samples_there = parts.sampler is None or isinstance(parts.sampler, CapturableSampler)
        self._on_device = samples_there and isinstance(parts.backend, CapturableBackend)

    def run(self, drafter: DraftModel, items: Sequence[PlanItem]) -> list[Drafted]:
        """Draft in `to_draft` passes after each item's uncomputed last known token.

        Uses the requests' seeds and parameters, so drafts are often right at any temperature.
        """
        paths, found, of = self._known(items), list[Drafted](), list(range(len(items)))
        if not self._on_device and any(item.unverified for item in items):
            # The host waits for the device: its kernels take lengths from the host.
            items = [_from(item, start) for item, start in zip(items, paths.starts.tolist(), strict=True)]
        for number in range(max(item.to_draft for item in items)):
            left = [n for n, i in enumerate(of) if items[i].to_draft > number]
            if len(left) < len(of):
                of, paths = [of[n] for n in left], paths.only(upload(left, self._device))
            lengths, width = self._lengths(paths, [items[i] for i in of], number), paths.width
            table, paths = self._passes.run(drafter, paths, number, lengths)
            found.append(Drafted(of, table, width, paths.topk))
        return found

    def _known(self, items: Sequence[PlanItem]) -> DraftPaths:
        rows = KnownRows(*upload(known_rows(items), self._device).T.contiguous().unbind())
        paths = self._passes.known(rows, topk=items[0].topk)
        if any(item.images is not None and item.images.rope is not None for item in items):
            return replace(paths, turns=rope_positions(items, paths.starts))
        return paths

    def _lengths(self, paths: DraftPaths, items: Sequence[PlanItem], number: int) -> PassLengths:
        if self._on_device:
            return DeviceLengths(self._parts, paths, paths.output_lens + number)
        return _HostLengths(self._parts, items)


def _from(item: PlanItem, start: int) -> PlanItem:
    return msgspec.structs.replace(item, start=start, output_len=item.output_len + start - item.start)
