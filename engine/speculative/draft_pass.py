"""The drafter's part of steps: its KV of computed tokens, the tails of pages, and drafts.

Entry i (K and V of its layers, in the token's place of the page) is computed from token i and the
model's hidden state of token i - 1: of the row before, else from the tail of its page.

    tokens    t0 t1 t2 t3 | t4 t5     a step computes t4, t5: entry 4 reads the first page's tail
    entries   0  h0 h1 h2 | h3 h4     the hidden state of each entry's input; of t0: zero
    tails              h3 |    h5     of a page's newest token, without rejected drafts

So a page depends on earlier tokens only. The inputs of MTP (arXiv:2412.19437) and EAGLE
(arXiv:2401.15077), one token later.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.attention.backend import CapturableBackend
from engine.core.plan import PlanItem
from engine.executor.graphs import RecordedRows
from engine.executor.step_part import Batch, ReadDrafts, Recorded, StepPart, first_rows
from engine.kv.step_batch import upload
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import DraftEntries, DraftModel
from engine.speculative.accepted_kv import AcceptedKV
from engine.speculative.draft_graphs import AcceptGraphs, DraftRecording, PassGraphs
from engine.speculative.draft_rows import has_trees, parent_rows, tail_rows
from engine.speculative.draft_steps import DraftParts, DraftSteps, Passes, Tails, guesses_of

_NO_FEATURES = torch.empty(0)


class DraftPass(StepPart):
    """Part of a step for a drafter that reads tokens; calls come in stream order."""

    def __init__(self, parts: DraftParts, tails: Tails | None = None, recording: DraftRecording | None = None) -> None:
        self._backend, self._page_table = parts.backend, parts.pools[0].page_table
        self._kv = AcceptedKV(parts, tails)
        passes = Passes(parts, tails)
        self._guesses = DraftSteps(parts, passes)
        self._passes = None if recording is None else PassGraphs(parts, passes, recording)
        self._accepts = None if recording is None else AcceptGraphs(parts, self._kv, recording)
        self.recorded: list[Recorded] = [each for each in (self._passes, self._accepts) if each is not None]
        self.follows_in_graphs = isinstance(parts.backend, CapturableBackend)

    def expect(self, batch: Batch) -> None:
        """Read the step's tokens before a recorded step replaces them."""
        if batch.items and not self.follows_in_graphs:
            batch.inputs()

    def end(self, batch: Batch, hidden: Tensor) -> None:
        """Keep the drafter's input; what follows from rows with drafts waits for `accept`."""
        if batch.followed is None:
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

    def recorded_rows(self, items: Sequence[PlanItem], size: int) -> list[list[int]]:
        return []

    def follow(self, model: DenseDecoder, rows: RecordedRows, hidden: Tensor) -> Tensor | None:
        self._write_recorded(model, rows, None)
        return None

    def _write_recorded(self, model: DenseDecoder, rows: RecordedRows, before: Tensor | None) -> None:
        assert isinstance(self._backend, CapturableBackend), "it follows in graphs"
        self._backend.begin_on_device(rows.step)
        _drafter(model).forward(DraftEntries(rows.ids, before, rows.positions), self._backend.attend)

    def accept(self, items: Sequence[PlanItem], tokens: Tensor | None) -> None:
        """Keep what later steps need of accepted rows of the last step with drafts."""
        self._accept(items, tokens, None)

    def _accept(self, items: Sequence[PlanItem], tokens: Tensor | None, features: Tensor | None) -> None:
        if not (self._kv.is_needed or has_trees(items)):
            return
        if self._accepts is None or not self._accepts.run(items, tokens, features):
            self._kv.keep_of(items, tokens, features)

    def draft(self, model: DenseDecoder, items: Sequence[PlanItem]) -> ReadDrafts:
        """Draft after each of `items` (draft_steps.py), on all ranks the same."""
        passes = None if self._passes is None else self._passes.run(items)
        if passes is None:
            passes = [one.on_host() for one in self._guesses.run(_drafter(model), items)]
        return partial(guesses_of, passes)

    def _ids(self, values: list[int]) -> Tensor:
        return upload(values, self._page_table.device)


class FeatureDraftPass(DraftPass):
    """Part of a step for a drafter that reads hidden states of the model (EAGLE, NEXTN)."""

    def __init__(self, parts: DraftParts, tails: Tails, recording: DraftRecording | None) -> None:
        super().__init__(parts, tails, recording)
        self._tails = tails
        self._features = _NO_FEATURES  # of the step that was followed last

    def forget(self) -> None:
        self._features = _NO_FEATURES

    def end(self, batch: Batch, hidden: Tensor) -> None:
        if batch.followed is not None:
            assert batch.followed.features is not None, "its pool has tails"
            self._features = batch.followed.features
        super().end(batch, hidden)

    def _follow(self, batch: Batch, hidden: Tensor) -> None:
        features = self._read(batch.model, hidden)
        self._write(batch, self._before(batch.items, first_rows(batch.items), features))
        self._features = features
        self._keep_tails(batch, features)

    def recorded_rows(self, items: Sequence[PlanItem], size: int) -> list[list[int]]:
        """`parent_rows`, and whether a row is of `tail_rows`."""
        parents, kept = parent_rows(items), {*tail_rows(items, self._page_table.page_size)}
        more = size - len(parents)
        return [parents + [-1] * more, [row in kept for row in range(size)]]

    def follow(self, model: DenseDecoder, rows: RecordedRows, hidden: Tensor) -> Tensor:
        features, (parents, kept) = self._read(model, hidden), rows.follow
        tails = self._tails.before(rows.slots, rows.places)
        before = torch.where((parents < 0)[:, None], tails, features[parents.clamp_min(0)])
        self._write_recorded(model, rows, before)
        self._tails.write(torch.where(kept > 0, rows.step.token_pages, 0), features)
        return features

    def _read(self, model: DenseDecoder, hidden: Tensor) -> Tensor:
        features = _drafter(model).features(hidden)
        assert features is not None, "its pool has tails"
        return features

    def accept(self, items: Sequence[PlanItem], tokens: Tensor | None) -> None:
        features, self._features = self._features, _NO_FEATURES
        self._accept(items, tokens, features)

    def _before(self, items: Sequence[PlanItem], starts: Sequence[int], features: Tensor) -> Tensor:
        """Features [T, size] of the token before each row."""
        firsts = [i for i, item in enumerate(items) if not item.draft]
        slots, positions = (self._ids([getattr(items[i], name) for i in firsts]) for name in ("slot", "start"))
        before = features.roll(1, 0)
        if apart := [i for i, item in enumerate(items) if item.behind > 1]:
            parents = self._ids([starts[i - items[i].behind] for i in apart])
            before.index_copy_(0, self._ids([starts[i] for i in apart]), features[parents])
        return before.index_copy_(0, self._ids([starts[i] for i in firsts]), self._tails.before(slots, positions))

    def _keep_tails(self, batch: Batch, features: Tensor) -> None:
        if rows := tail_rows(batch.items, self._page_table.page_size):
            at = self._ids(rows)
            self._tails.write(batch.rows.step.token_pages[at], features[at])


def draft_pass(parts: DraftParts, recording: DraftRecording | None = None) -> DraftPass:
    pool, page_table = parts.pools[0]
    if pool.tails is None:
        return DraftPass(parts, recording=recording)
    return FeatureDraftPass(parts, Tails(pool.tails, page_table), recording)


def _drafter(model: DenseDecoder) -> DraftModel:
    assert model.drafter is not None, "the model was loaded without its drafter"
    return model.drafter
