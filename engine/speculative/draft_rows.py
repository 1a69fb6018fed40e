"""Rows of a step that read drafts: places in trees (drafts.py), and which rows count.

The latter is found on the device, behind sampling and without a wait for the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.executor.step_part import StepPart, StepRows, first_rows, runs_of
from engine.kv.step_batch import PageTable, TreePaths, upload
from engine.parallel.collectives import Collectives


class DraftTrees(StepPart):
    """Trees of drafts: rows with KV elsewhere than in their own places, where others find it."""

    def __init__(self, page_table: PageTable) -> None:
        self._table = page_table

    def fill(self, rows: StepRows) -> None:
        if not has_trees(rows.items):
            return
        step, device = rows.step, self._table.device
        rows.places = upload(torch.tensor(places_of(rows.items)), device)
        step.token_pages, step.token_offsets = self._table.locate(rows.token_slots, rows.places)
        step.paths = paths_of(rows.items, device)


def has_trees(items: Sequence[PlanItem]) -> bool:
    return any(item.place >= 0 for item in items)


def places_of(items: Sequence[PlanItem]) -> list[int]:
    return [place for item in items for place in (range(item.start, item.kv_len) if item.place < 0 else (item.place,))]


def paths_of(items: Sequence[PlanItem], device: torch.device) -> TreePaths:
    paths = _paths(items)
    starts = [item.kv_len - len(path) for item, path in zip(items, paths, strict=True)]
    rows = _padded([[start, *path] for start, path in zip(starts, paths, strict=True)])
    on_device = upload(torch.tensor(rows, dtype=torch.int32), device)
    return TreePaths(starts=on_device[:, 0].contiguous(), places=on_device[:, 1:].contiguous())


def tree_rows(items: Sequence[PlanItem], like: Tensor) -> Tensor:
    """[rows, 2 + depth] int32 on the host for a decode step.

    Place and path of each row, as of TreePaths. Rows behind `items` are padding.
    """
    found = torch.zeros(like.shape, dtype=torch.int32)
    found[:, 1] = 1
    paths = _paths(items)
    rows = [
        [place, item.kv_len - len(path), *path]
        for place, item, path in zip(places_of(items), items, paths, strict=True)
    ]
    filled = torch.tensor(_padded(rows), dtype=torch.int32)
    found[: len(items), : filled.shape[1]] = filled
    return found


def _paths(items: Sequence[PlanItem]) -> list[list[int]]:
    """Return for each row the places of its tokens, from the first displaced one on."""
    paths: list[list[int]] = []
    for i, item in enumerate(items):
        above = paths[i - item.behind] if item.draft else []
        displaced = item.place >= 0 or bool(above)
        paths.append([*above, item.start if item.place < 0 else item.place] if displaced else [])
    return paths


def _padded(rows: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows]


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """The n rows of all requests with drafts, rows of known tokens included.

    `items`: of each. `rows`: [n] int64, its place in the step. `parents`: [n] int64, the number of
    the one that samples its token, or its own for a known token. `right`: [n] bool, whether it
    counts: its parent sampled its token, and counts.
    """

    items: list[PlanItem]
    rows: Tensor
    parents: Tensor
    right: Tensor

    def last(self) -> Tensor:
        """[n] bool: those that count without any that counts behind them."""
        followed = torch.zeros_like(self.parents)
        is_draft = self.parents != torch.arange(len(self.parents), device=self.parents.device)
        followed.index_add_(0, self.parents, (self.right & is_draft).long())
        return self.right & (followed == 0)


def judged_rows(
    items: Sequence[PlanItem], tokens: Tensor | None, *, collectives: Collectives, device: torch.device
) -> AcceptedRows:
    """Judge the drafts of a step.

    `tokens`: sampled by the items that sample, in their order; None on a rank that samples nothing.
    """
    starts = first_rows(items)
    samples = {i: at for at, i in enumerate(i for i, item in enumerate(items) if item.sample)}
    chosen = [i for run in runs_of(items) if len(run) > 1 for i in run]
    number = {i: at for at, i in enumerate(chosen)}
    parents = [number[i - items[i].behind] for i in chosen]
    guessed = [items[i].tokens[0] if items[i].draft else -1 for i in chosen]
    sampled = [samples[i - items[i].behind] for i in chosen]
    rows, above, guesses, at = upload(
        torch.tensor([[starts[i] for i in chosen], parents, guessed, sampled]), device
    ).unbind()
    own = torch.zeros(len(chosen), device=device)
    if tokens is not None:
        own = ((tokens.to(device)[at] == guesses) | (guesses < 0)).float()
    right = collectives.sum(own[:, None], dtype=torch.float32)[:, 0] > 0
    return AcceptedRows([items[i] for i in chosen], rows, above, _with_all_before(right, above, _deepest(parents)))


def _deepest(parents: Sequence[int]) -> int:
    """The most drafts that a row reads, itself included."""
    depths: list[int] = []
    for i, parent in enumerate(parents):
        depths.append(0 if parent == i else depths[parent] + 1)
    return max(depths)


def _with_all_before(right: Tensor, parents: Tensor, deepest: int) -> Tensor:
    """Keep the right rows whose predecessors are all right; each round looks twice as far."""
    for _ in range(deepest.bit_length()):
        right, parents = right & right[parents], parents[parents]
    return right
