"""The drafter's part of steps: its KV of computed tokens, the tails of pages, and drafts.

Entry i (K and V of its layers, in the token's place of the page) is computed from token i and the
model's hidden state of token i - 1: of the row before, else from the tail of its page.

    tokens    t0 t1 t2 t3 | t4 t5     a step computes t4, t5: entry 4 reads the first page's tail
    entries   0  h0 h1 h2 | h3 h4     the hidden state of each entry's input; of t0: zero
    tails              h3 |    h5     of a page's newest token, without rejected drafts

So a page depends on earlier tokens only, and is shared, copied and handed over as without a
drafter. Rows of rejected drafts are overwritten like the model's. The inputs of MTP (DeepSeek-V3,
arXiv:2412.19437) and EAGLE (arXiv:2401.15077), one token later.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.executor.step_part import Batch, ReadDrafts, StepPart, first_rows, runs_of
from engine.kv.step_batch import upload
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import DraftEntries, DraftModel
from engine.speculative.draft_rows import AcceptedRows, has_trees, judged_rows
from engine.speculative.draft_steps import DraftParts, DraftSteps, Tails, guesses_of

_NO_FEATURES = torch.empty(0)


class DraftPass(StepPart):
    """Part of a step for a drafter that reads tokens; calls come in stream order."""

    def __init__(self, parts: DraftParts, tails: Tails | None = None) -> None:
        self._pools, self._backend, self._collectives = parts.pools, parts.backend, parts.collectives
        pool, self._page_table = parts.pools[0]
        self._device = pool.device
        self._samples = parts.sampler is not None
        self._guesses = DraftSteps(parts, tails)

    def expect(self, batch: Batch) -> None:
        """Read the step's tokens before a recorded step replaces them."""
        batch.inputs()

    def end(self, batch: Batch, hidden: Tensor) -> None:
        """Keep the drafter's input; what follows from rows with drafts waits for `accept`."""
        batch.hold_all()
        self._follow(batch, hidden)
        batch.layers.all_written(batch.plan.seq)

    def _follow(self, batch: Batch, hidden: Tensor) -> None:
        self._write(batch, None)

    def _write(self, batch: Batch, before: Tensor | None) -> None:
        """Compute the drafter's KV. `before` [T, size]: features of the token before each row."""
        rows = batch.rows
        self._backend.begin(rows.step)
        entries = DraftEntries(batch.inputs(), before, rows.positions, batch.images)
        _drafter(batch.model).forward(entries, self._backend.attend)

    def accept(self, items: Sequence[PlanItem], tokens: Tensor | None) -> None:
        """Move KV of accepted rows of the last step with drafts."""
        if has_trees(items):
            rows = judged_rows(items, tokens, collectives=self._collectives, device=self._device)
            self._move(rows, *self._places(rows))

    def draft(self, model: DenseDecoder, items: Sequence[PlanItem]) -> ReadDrafts:
        """Draft after each of `items` (draft_steps.py); a rank without sampler keeps none."""
        passes = self._guesses.run(_drafter(model), items)
        return partial(guesses_of, [one.on_host() for one in passes] if self._samples else [])

    def _places(self, rows: AcceptedRows) -> tuple[Tensor, Tensor]:
        slots, positions = (self._ids([getattr(item, name) for item in rows.items]) for name in ("slot", "start"))
        return slots, positions

    def _move(self, rows: AcceptedRows, slots: Tensor, positions: Tensor) -> None:
        """Move KV of accepted rows from tree places to their own; others move from page 0 to 0."""
        displaced = [i for i, item in enumerate(rows.items) if item.place >= 0]
        at, places = self._ids(displaced), self._ids([rows.items[i].place for i in displaced])
        right = rows.right[at]
        for pool, table in self._pools:
            ends = [table.locate(slots[at], where) for where in (places, positions[at])]
            (from_pages, from_offsets), (to_pages, to_offsets) = (
                (torch.where(right, pages, 0), torch.where(right, offsets, 0)) for pages, offsets in ends
            )
            pool.move(from_pages, from_offsets, to_pages, to_offsets)

    @property
    def _page_size(self) -> int:
        return self._page_table.page_size

    def _ids(self, values: list[int]) -> Tensor:
        return upload(torch.tensor(values), self._device)


class FeatureDraftPass(DraftPass):
    """Part of a step for a drafter that reads hidden states of the model (EAGLE, NEXTN)."""

    def __init__(self, parts: DraftParts, tails: Tails) -> None:
        super().__init__(parts, tails)
        self._tails = tails
        self._features = _NO_FEATURES  # of the step that was followed last

    def forget(self) -> None:
        self._features = _NO_FEATURES

    def _follow(self, batch: Batch, hidden: Tensor) -> None:
        items, features = batch.items, _drafter(batch.model).features(hidden)
        assert features is not None, "its pool has tails"
        starts = first_rows(items)
        self._write(batch, self._before(items, starts, features))
        self._features = features
        self._keep_tails([run for run in runs_of(items) if len(run) == 1], starts, items, features)

    def accept(self, items: Sequence[PlanItem], tokens: Tensor | None) -> None:
        features, self._features = self._features, _NO_FEATURES
        rows = judged_rows(items, tokens, collectives=self._collectives, device=self._device)
        slots, positions = self._places(rows)
        ends = [item.kv_len % self._page_size == 0 for item in rows.items]
        counts = rows.last() | (rows.right & upload(torch.tensor(ends), self._device))
        pages, _ = self._page_table.locate(slots, torch.where(counts, positions, 0))
        self._tails.write(torch.where(counts, pages, 0), features[rows.rows])
        if has_trees(items):
            self._move(rows, slots, positions)

    def _before(self, items: Sequence[PlanItem], starts: Sequence[int], features: Tensor) -> Tensor:
        """Features [T, size] of the token before each row."""
        firsts = [i for i, item in enumerate(items) if not item.draft]
        slots, positions = (self._ids([getattr(items[i], name) for i in firsts]) for name in ("slot", "start"))
        before = features.roll(1, 0)
        if apart := [i for i, item in enumerate(items) if item.behind > 1]:
            parents = self._ids([starts[i - items[i].behind] for i in apart])
            before.index_copy_(0, self._ids([starts[i] for i in apart]), features[parents])
        return before.index_copy_(0, self._ids([starts[i] for i in firsts]), self._tails.before(slots, positions))

    def _keep_tails(
        self, runs: Sequence[Sequence[int]], starts: Sequence[int], items: Sequence[PlanItem], features: Tensor
    ) -> None:
        """Keep tails of requests without rejections: the last token of each touched page."""
        found = [(item, at) for (i,) in runs for item in [items[i]] for at in self._page_ends(item)]
        if not found:
            return
        first = {id(items[i]): starts[i] for (i,) in runs}
        slots, positions = self._ids([item.slot for item, _ in found]), self._ids([at for _, at in found])
        pages, _ = self._page_table.locate(slots, positions)
        self._tails.write(pages, features[self._ids([first[id(item)] + at - item.start for item, at in found])])

    def _page_ends(self, item: PlanItem) -> list[int]:
        size = self._page_size
        whole = range(item.start // size * size + size - 1, item.kv_len - 1, size)
        return [*whole, item.kv_len - 1]


def draft_pass(parts: DraftParts) -> DraftPass:
    pool, page_table = parts.pools[0]
    return DraftPass(parts) if pool.tails is None else FeatureDraftPass(parts, Tails(pool.tails, page_table))


def _drafter(model: DenseDecoder) -> DraftModel:
    assert model.drafter is not None, "the model was loaded without its drafter"
    return model.drafter
