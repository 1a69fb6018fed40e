"""The drafter's part of steps: what it keeps of the tokens that a step computes, the tails of pages, and drafts.

What it keeps of token i (K and V of its layers, in the token's own place of the page) is computed from that token and from the
model's hidden state of token i - 1: of the row before in the same step, else from the tail of the page where i - 1 lies.

    tokens      t0 t1 t2 t3 | t4 t5              a step computes t4 and t5: entry 4 reads the first page's tail
    entries     0  h0 h1 h2 | h3 h4              the hidden state that each entry is computed with; of t0: zero
    tails                h3 |    h5              of a page's newest token, drafts that were rejected left out

So a page depends on what stands before it alone, and is shared, copied and handed over as without a drafter; what goes on from it
drafts as well as the engine that wrote it. Rows of rejected drafts are overwritten as the model's are. Source of the shift: the
inputs of MTP (DeepSeek-V3, arXiv:2412.19437) and EAGLE (arXiv:2401.15077) one token later.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.core.plan import PlanItem
from engine.executor.draft_rows import JudgedRows, has_trees, judged_rows
from engine.executor.guess_pass import Drafted, GuessPass, Tails
from engine.executor.logit_rows import first_rows, runs_of
from engine.executor.step_part import Batch, StepPart
from engine.kv.kv_pool import KVPool
from engine.kv.page_table import PageTable
from engine.kv.upload import upload
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import DraftModel
from engine.parallel.collectives import Collectives
from engine.sampler.make import TokenSampler


class PagedPool(NamedTuple):
    """KV of some layers, and where requests have their pages in it."""

    pool: KVPool
    page_table: PageTable


class DraftPass(StepPart):
    """`sampler`: of the rank that samples; None: another one does. `collectives`: of the ranks of the model, if there are several.

    `pools`: of the KV of all layers, the drafter's in the first; `backend`: of the drafter's. Calls come in stream order.
    """

    def __init__(
        self,
        *,
        pools: Sequence[PagedPool],
        backend: AttentionBackend,
        sampler: TokenSampler | None,
        collectives: Collectives | None,
    ) -> None:
        self._pools = pools
        self._backend = backend
        self._collectives = collectives
        pool, self._page_table = pools[0]
        self._device = pool.device
        self._tails = None if pool.tails is None else Tails(pool.tails, self._page_table)
        self._guesses = GuessPass(
            page_table=self._page_table,
            tails=self._tails,
            backend=backend,
            sampler=sampler,
            collectives=collectives,
        )
        self._features: Tensor | None = None  # of the step that was followed last

    def forget(self) -> None:
        self._features = None

    def expect(self, batch: Batch) -> None:
        """Read the step's tokens now: a recorded step stores other ones."""
        batch.inputs()

    def end(self, batch: Batch, hidden: Tensor) -> None:
        """Keep what the drafter needs of the step's tokens. Tails of requests with drafts wait for `accept`."""
        batch.arrival.hold_all()
        items, rows, drafter = batch.items, batch.rows, _drafter(batch.model)
        starts, features = first_rows(items), drafter.features(hidden)
        before = None if features is None else self._before(items, starts, features)
        self._backend.begin(rows.step)
        drafter.forward(batch.inputs(), before, rows.positions, self._backend.attend, batch.images)
        self._features = features
        if features is not None:
            self._keep_tails([run for run in runs_of(items) if len(run) == 1], starts, items, features)
        batch.layers.all_written(batch.plan.seq)

    def accept(self, items: Sequence[PlanItem], tokens: Tensor | None) -> None:
        """Note which rows count of the step with drafts that was followed last: keep their tails, and put their KV in its place.

        `tokens`: sampled by the items that sample, in their order; None on a rank that samples nothing.
        """
        (features, self._features), trees = (self._features, None), has_trees(items)
        if features is None and not trees:
            return
        rows = judged_rows(items, tokens, collectives=self._collectives, device=self._device)
        slots, positions = (self._ids([getattr(item, name) for item in rows.items]) for name in ("slot", "start"))
        if features is not None:
            ends = [item.kv_len % self._page_size == 0 for item in rows.items]
            counts = rows.last() | (rows.right & upload(torch.tensor(ends), self._device))
            pages, _ = self._page_table.locate(slots, torch.where(counts, positions, 0))
            assert self._tails is not None
            self._tails.write(torch.where(counts, pages, 0), features[rows.rows])
        if trees:
            self._move(rows, slots, positions)

    def draft(self, model: DenseDecoder, items: Sequence[PlanItem]) -> list[Drafted]:
        """Draft behind each of `items` (engine/executor/guess_pass.py)."""
        return self._guesses.run(_drafter(model), items)

    def _move(self, rows: JudgedRows, slots: Tensor, positions: Tensor) -> None:
        """Move the KV of rows that count from the places of a tree to their own; what stays moves from page 0 to page 0."""
        displaced = [i for i, item in enumerate(rows.items) if item.place >= 0]
        at, places = self._ids(displaced), self._ids([rows.items[i].place for i in displaced])
        right = rows.right[at]
        for pool, table in self._pools:
            ends = [table.locate(slots[at], where) for where in (places, positions[at])]
            (from_pages, from_offsets), (to_pages, to_offsets) = (
                (torch.where(right, pages, 0), torch.where(right, offsets, 0)) for pages, offsets in ends
            )
            pool.move(from_pages, from_offsets, to_pages, to_offsets)

    def _before(self, items: Sequence[PlanItem], starts: Sequence[int], features: Tensor) -> Tensor:
        """[T, size]: of each row, the features of the token before it."""
        firsts = [i for i, item in enumerate(items) if not item.draft]
        slots, positions = (self._ids([getattr(items[i], name) for i in firsts]) for name in ("slot", "start"))
        before = features.roll(1, 0)
        if apart := [i for i, item in enumerate(items) if item.behind > 1]:
            parents = self._ids([starts[i - items[i].behind] for i in apart])
            before.index_copy_(0, self._ids([starts[i] for i in apart]), features[parents])
        assert self._tails is not None
        return before.index_copy_(0, self._ids([starts[i] for i in firsts]), self._tails.before(slots, positions))

    def _keep_tails(
        self, runs: Sequence[Sequence[int]], starts: Sequence[int], items: Sequence[PlanItem], features: Tensor
    ) -> None:
        """Keep the tails of requests whose rows all count: of the last token of each page that their rows touch."""
        found = [(item, at) for (i,) in runs for item in [items[i]] for at in self._page_ends(item)]
        if not found:
            return
        first = {id(items[i]): starts[i] for (i,) in runs}
        slots, positions = self._ids([item.slot for item, _ in found]), self._ids([at for _, at in found])
        pages, _ = self._page_table.locate(slots, positions)
        assert self._tails is not None
        self._tails.write(pages, features[self._ids([first[id(item)] + at - item.start for item, at in found])])

    def _page_ends(self, item: PlanItem) -> list[int]:
        size = self._page_size
        whole = range(item.start // size * size + size - 1, item.kv_len - 1, size)
        return [*whole, item.kv_len - 1]

    @property
    def _page_size(self) -> int:
        return self._page_table.page_size

    def _ids(self, values: list[int]) -> Tensor:
        return upload(torch.tensor(values), self._device)


def _drafter(model: DenseDecoder) -> DraftModel:
    assert model.drafter is not None, "the model was loaded without its drafter"
    return model.drafter
