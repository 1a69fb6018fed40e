"""KV, tails and newest tokens of verified rows: what counts comes to its place, behind sampling."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.executor.step_part import first_rows, runs_of
from engine.kv.step_batch import upload
from engine.speculative.draft_rows import JudgedRows, VerifiedRows, deepest_of, has_trees, judged, verified_rows
from engine.speculative.draft_steps import DraftParts, Tails


class AcceptedKV:
    def __init__(self, parts: DraftParts, tails: Tails | None) -> None:
        self._pools, self._page_table, self._tails = parts.pools, parts.pools[0].page_table, tails
        self._collectives, self._futures = parts.collectives, parts.futures
        self.is_needed = tails is not None or parts.futures is not None  # by chains; trees always leave something

    def keep_of(self, items: Sequence[PlanItem], tokens: Tensor | None, features: Tensor | None) -> None:
        """Keep what follows from a step with drafts, by `features` [T, size] of its rows.

        `tokens`: sampled by the items that sample, in their order; None on a rank that samples nothing.
        """
        chosen = [i for run in runs_of(items) if len(run) > 1 for i in run]
        verified, firsts = [items[i] for i in chosen], first_rows(items)
        samples = list(accumulate((item.sample for item in items), initial=0))
        table = [
            (*row, firsts[i], samples[i])
            for i, row in zip(chosen, verified_rows(verified, self._page_table.page_size), strict=True)
        ]
        *rows, at, sampled_at = upload(torch.tensor(table).T.contiguous(), self._page_table.device).unbind()
        sampled = None if tokens is None else tokens[sampled_at]
        own = None if features is None else features[at]
        self.keep(VerifiedRows(*rows), sampled, own, deepest=deepest_of(verified), trees=has_trees(verified))

    def keep(
        self, rows: VerifiedRows, sampled: Tensor | None, features: Tensor | None, *, deepest: int, trees: bool
    ) -> None:
        """Keep what follows from `rows`; `features` [n, size] and `sampled` [n] are of these."""
        if self._futures is not None:
            rows = rows._replace(guesses=self._futures.read(rows.guesses))
        found = judged(rows, sampled, deepest=deepest, collectives=self._collectives)
        if self._futures is not None:
            self._futures.keep_verified(rows, found)
        if features is not None:
            self._keep_tails(rows, found, features)
        if trees:
            self._move(rows, found.right & (rows.places >= 0))

    def _keep_tails(self, rows: VerifiedRows, found: JudgedRows, features: Tensor) -> None:
        """Keep `features` of each page's newest row that counts."""
        assert self._tails is not None, "the drafter reads hidden states"
        counts = found.last | (found.right & (rows.ends > 0))
        pages, _ = self._page_table.locate(rows.slots, torch.where(counts, rows.positions, 0))
        self._tails.write(torch.where(counts, pages, 0), features)

    def _move(self, rows: VerifiedRows, right: Tensor) -> None:
        """Move KV of rows `right` from tree places to their own; others from page 0 to 0."""
        for pool, table in self._pools:
            ends = [table.locate(rows.slots, torch.where(right, where, 0)) for where in (rows.places, rows.positions)]
            (from_pages, from_offsets), (to_pages, to_offsets) = (
                (torch.where(right, pages, 0), torch.where(right, offsets, 0)) for pages, offsets in ends
            )
            pool.move(from_pages, from_offsets, to_pages, to_offsets)
