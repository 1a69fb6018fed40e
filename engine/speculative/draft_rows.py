"""Rows of a step that read drafts: places in trees (drafts.py), and which rows count.

The latter is found on the device, behind sampling and without a wait for the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
        rows.places = upload(places_of(rows.items), device)
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
    if rows:
        filled = torch.tensor(_padded(rows), dtype=torch.int32)
        found[: len(items), : filled.shape[1]] = filled
    return found


def parent_rows(items: Sequence[PlanItem]) -> list[int]:
    """Each row's predecessor in its request; -1: of an earlier step."""
    starts = first_rows(items)
    rows: list[int] = []
    for i, item in enumerate(items):
        rows.append(starts[i - item.behind + 1] - 1 if item.draft else -1)
        rows += range(starts[i], starts[i + 1] - 1)
    return rows


def tail_rows(items: Sequence[PlanItem], page_size: int) -> list[int]:
    """Rows of each page's last token; those of requests with drafts wait for `accept`."""
    starts = first_rows(items)
    rows: list[int] = []
    for item, first in ((items[run[0]], starts[run[0]]) for run in runs_of(items) if len(run) == 1):
        whole = range(item.start // page_size * page_size + page_size - 1, item.kv_len - 1, page_size)
        rows += [first + at - item.start for at in (*whole, item.kv_len - 1)]
    return rows


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


class VerifiedRows(NamedTuple):
    """Rows that read drafts, and of known tokens before them, [n] int64 each.

    `parents`: the row that samples its token, or its own for a known token. `guesses`: drafts, or
    placeholders. `places`: as of PlanItem. `ends`: 1 for the last of a page.
    """

    parents: Tensor
    guesses: Tensor
    slots: Tensor
    positions: Tensor
    places: Tensor
    ends: Tensor

    def are_known(self) -> Tensor:
        return self.parents == torch.arange(len(self.parents), device=self.parents.device)


def verified_rows(items: Sequence[PlanItem], page_size: int) -> list[tuple[int, ...]]:
    """Fields of VerifiedRows for each of `items`, whole requests."""
    return [
        (
            i - item.behind,
            item.tokens[0] if item.draft else 0,
            item.slot,
            item.start,
            item.place,
            int(item.kv_len % page_size == 0),
        )
        for i, item in enumerate(items)
    ]


class JudgedRows(NamedTuple):
    """`tokens` [n] int64: sampled by each row, on all ranks.

    `right` [n] bool: it counts: its parent sampled its token, and counts. `last` [n] bool: it counts
    without any that counts behind it.
    """

    tokens: Tensor
    right: Tensor
    last: Tensor


def judged(rows: VerifiedRows, sampled: Tensor | None, *, deepest: int, collectives: Collectives) -> JudgedRows:
    """Judge paths of up to `deepest` drafts, which are no placeholders.

    `sampled` [n]: by each row; None on a rank that samples nothing.
    """
    are_known = rows.are_known()
    if sampled is None:
        own = torch.zeros(len(are_known), 2, device=are_known.device)
    else:  # float32 holds every token
        own = torch.stack(((sampled[rows.parents] == rows.guesses) | are_known, sampled), 1).float()
    own_is_right, tokens = collectives.sum(own, dtype=torch.float32).unbind(1)
    right = _with_all_before(own_is_right > 0, rows.parents, deepest)
    followed = torch.zeros_like(rows.parents).index_add_(0, rows.parents, (right & ~are_known).long())
    return JudgedRows(tokens.long(), right, right & (followed == 0))


def deepest_of(items: Sequence[PlanItem]) -> int:
    """The most drafts that one of `items`, whole requests, reads, its own included."""
    depths: list[int] = []
    for i, item in enumerate(items):
        depths.append(depths[i - item.behind] + 1 if item.draft else 0)
    return max(depths)


def _with_all_before(right: Tensor, parents: Tensor, deepest: int) -> Tensor:
    """Keep the right rows whose predecessors are all right; each round looks twice as far."""
    for _ in range(deepest.bit_length()):
        right, parents = right & right[parents], parents[parents]
    return right
