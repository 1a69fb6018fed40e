"""Drafter passes behind the last known tokens, each one token further.

With topk above 1 drafts form a tree: each pass extends the topk most probable paths by topk tokens
each (EAGLE-2, arXiv:2406.16858). Their entries lie behind the known tokens, path by path, until
overwritten by a model step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.core.plan import Guess, PlanItem
from engine.executor.image_pass import rope_positions
from engine.executor.step_part import PagedPool
from engine.kv.step_batch import PageTable, StepBatch, TreePaths, to_host, upload
from engine.models.draft_model import DraftEntries, DraftModel
from engine.parallel.collectives import Collectives
from engine.sampler.sampler import TokenSampler


@dataclass(frozen=True, slots=True)
class Drafted:
    """Candidates of a pass for items `of`, on device or host.

    `tokens` [n, paths, topk] int64 and float32 `confidences` follow each path. `paths` [n, topk]
    int64: chosen candidates, numbered per item; the first pass has one path.
    """

    of: list[int]
    tokens: Tensor
    confidences: Tensor
    paths: Tensor

    def on_host(self) -> "Drafted":
        """Copies, on CUDA valid after the step's event."""
        return Drafted(self.of, to_host(self.tokens), to_host(self.confidences), to_host(self.paths))


def guesses_of(passes: Sequence[Drafted]) -> dict[int, list[Guess]]:
    """Candidates by item, from passes on the host."""
    guesses: dict[int, list[Guess]] = {}
    parents: dict[int, list[int]] = {}  # of the next pass's paths
    for one in passes:
        each = zip(one.of, one.tokens.tolist(), one.confidences.tolist(), one.paths.tolist(), strict=True)
        for i, tokens, confidences, paths in each:
            found, above = guesses.setdefault(i, []), parents.get(i, [-1])
            parents[i] = [len(found) + path for path in paths]
            for parent, row, trusted in zip(above, tokens, confidences, strict=True):
                found += [Guess(token, parent, value) for token, value in zip(row, trusted, strict=True)]
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


@dataclass(frozen=True, slots=True)
class _Paths:
    """Input of a pass: equally many draft paths per item; rows go by item, then path.

    `of` numbers `items` in the step; `slots`, `starts` and RoPE `turns` are [n] int64. For each
    path's newest token: `ids` [n, paths] int64, `hidden` [n * paths, size]; `scores` [n, paths] are
    log confidences, `places` [n, paths, drafts] int64 their entries.
    """

    of: list[int]
    items: list[PlanItem]
    slots: Tensor
    starts: Tensor
    turns: Tensor
    ids: Tensor
    hidden: Tensor | None
    scores: Tensor
    places: Tensor

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    @property
    def topk(self) -> int:
        """Paths that continue."""
        return self.items[0].topk

    def only(self, chosen: list[int], at: Tensor) -> "_Paths":
        """Paths of items `chosen`; `at`: `chosen` on the device."""
        hidden = self.hidden
        if hidden is not None:
            hidden = hidden.reshape(-1, self.width, *hidden.shape[1:])[at].flatten(0, 1)
        slots, starts, turns, ids, scores, places = (
            x[at] for x in (self.slots, self.starts, self.turns, self.ids, self.scores, self.places)
        )
        of, items = [self.of[n] for n in chosen], [self.items[n] for n in chosen]
        return _Paths(of, items, slots, starts, turns, ids, hidden, scores, places)

    def extended(self, drafted: Drafted, out: Tensor, *, scores: Tensor, places: Tensor) -> "_Paths":
        """Paths chosen by `drafted`, from `out` [n * paths, size], `places` [n, paths, drafts]."""
        chosen = drafted.paths
        above = chosen // self.topk
        hidden = None
        if self.hidden is not None:
            first = torch.arange(len(self.items), device=above.device)[:, None] * self.width
            hidden = out[(first + above).flatten()]
        return replace(
            self,
            ids=drafted.tokens.flatten(1).gather(1, chosen),
            hidden=hidden,
            scores=scores,
            places=places.gather(1, above[:, :, None].expand(-1, -1, places.shape[2])),
        )


class DraftParts(NamedTuple):
    """`pools`: KV of all layers, the first with the drafter's; `backend`: for these.

    `sampler`: on the rank that samples. `collectives`: of the model's ranks.
    """

    pools: Sequence[PagedPool]
    backend: AttentionBackend
    sampler: TokenSampler | None
    collectives: Collectives


class DraftSteps:
    """Passes for DraftPass. `tails` is for drafters that read them."""

    def __init__(self, parts: DraftParts, tails: Tails | None) -> None:
        self._page_table = parts.pools[0].page_table
        self._tails = tails
        self._backend, self._sampler, self._collectives = parts.backend, parts.sampler, parts.collectives
        self._device = self._page_table.device

    def run(self, drafter: DraftModel, items: Sequence[PlanItem]) -> list[Drafted]:
        """Draft in `to_draft` passes after each item's uncomputed last known token.

        Uses the requests' seeds and parameters, so drafts are often right at any temperature.
        """
        paths, found = self._known(items), list[Drafted]()
        for number in range(max(item.to_draft for item in items)):
            left = [n for n, item in enumerate(paths.items) if item.to_draft > number]
            if len(left) < len(paths.items):
                paths = paths.only(left, self._ids(left))
            drafted, paths = self._pass(drafter, paths, number)
            found.append(drafted)
        return found

    def _known(self, items: Sequence[PlanItem]) -> _Paths:
        slots, starts = self._ids([item.slot for item in items]), self._ids([item.start for item in items])
        return _Paths(
            of=list(range(len(items))),
            items=list(items),
            slots=slots,
            starts=starts,
            turns=rope_positions(items, starts),
            ids=self._ids([item.tokens[0] for item in items])[:, None],
            hidden=None if self._tails is None else self._tails.before(slots, starts),
            scores=torch.zeros(len(items), 1, device=self._device),
            places=starts.new_empty(len(items), 1, 0),
        )

    def _pass(self, drafter: DraftModel, paths: _Paths, number: int) -> tuple[Drafted, _Paths]:
        """Compute each path's newest token; return candidates and the next paths."""
        own = self._own_places(paths, number)
        places = paths.places if number == 0 else torch.cat((paths.places, own[:, :, None]), 2)
        positions = (paths.turns + number).repeat_interleave(paths.width)
        self._backend.begin(self._step(paths, own, places, number))
        out = drafter.forward(DraftEntries(paths.ids.flatten(), paths.hidden, positions), self._backend.attend)
        tokens, confidences = self._guesses(drafter, out, paths, number)
        best = (paths.scores[:, :, None] + confidences.log()).flatten(1).topk(paths.topk, 1)
        drafted = Drafted(paths.of, tokens, confidences, best.indices)
        return drafted, paths.extended(drafted, out, scores=best.values, places=places)

    def _own_places(self, paths: _Paths, number: int) -> Tensor:
        """Entry places [n, paths] of pass `number`; the known token's is its own."""
        behind = 1 + (number - 1) * paths.topk if number else 0
        return paths.starts[:, None] + behind + torch.arange(paths.width, device=self._device)

    def _step(self, paths: _Paths, own: Tensor, places: Tensor, number: int) -> StepBatch:
        """`own` [n, paths]: token places, `places` [n, paths, drafts]: all."""
        width, slots = paths.width, paths.slots.repeat_interleave(paths.width)
        pages, offsets = self._page_table.locate(slots, own.flatten())
        rows = len(slots)
        return StepBatch(
            extend=False,
            q_lens=[1] * rows,
            kv_lens=[item.kv_len + number for item in paths.items for _ in range(width)],
            page_table=self._page_table.rows,
            slots=slots,
            token_pages=pages,
            token_offsets=offsets,
            drafted=frozenset(row for row in range(rows) if row % width),
            paths=self._mapping(paths, places) if paths.topk > 1 and number else None,
        )

    def _mapping(self, paths: _Paths, places: Tensor) -> TreePaths:
        starts = (paths.starts + 1).repeat_interleave(paths.width)
        return TreePaths(starts=starts.to(torch.int32), places=places.flatten(0, 1).to(torch.int32))

    def _guesses(self, drafter: DraftModel, out: Tensor, paths: _Paths, number: int) -> tuple[Tensor, Tensor]:
        """Best tokens [n, paths, topk] int64 and float32 confidences from `out`, on all ranks."""
        logits, best = drafter.logits(out), torch.zeros(2, len(out), paths.topk, device=self._device)
        if self._sampler is not None:
            assert logits is not None, "the rank that samples has all logits"
            rows = [item for item in paths.items for _ in range(paths.width)]
            self._sample(self._sampler, logits, rows, number, into=best)
        best = self._collectives.sum(best.flatten(0, 1), dtype=torch.float32).view_as(best)
        shape = len(paths.items), paths.width, paths.topk
        return best[0].to(torch.int64).view(shape), best[1].view(shape)

    def _sample(
        self, sampler: TokenSampler, logits: Tensor, rows: Sequence[PlanItem], number: int, *, into: Tensor
    ) -> None:
        """Sample topk distinct tokens `into` [2, rows, topk]: float32 tokens and confidences."""
        slots, lens = [item.slot for item in rows], [item.output_len + number for item in rows]
        total = logits.logsumexp(1, keepdim=True)
        topk = into.shape[2]
        for rank in range(topk):
            tokens = sampler.guess(logits, slots, lens)[:, None]
            into[0, :, rank : rank + 1] = tokens
            into[1, :, rank : rank + 1] = (logits.gather(1, tokens) - total).exp()
            if rank + 1 < topk:
                logits = logits.scatter(1, tokens, -torch.inf)

    def _ids(self, values: list[int]) -> Tensor:
        return upload(torch.tensor(values), self._device)
