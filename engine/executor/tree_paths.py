"""Where the tokens of a step go, and where rows of a tree of drafts find those that they see (engine/core/draft_rows.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.kv.step_batch import TreePaths
from engine.kv.upload import upload


def has_trees(items: Sequence[PlanItem]) -> bool:
    """Whether some row's KV goes elsewhere than to its own place."""
    return any(item.place >= 0 for item in items)


def places_of(items: Sequence[PlanItem]) -> list[int]:
    """Return the positions whose places take the KV of the items' tokens."""
    return [place for item in items for place in (range(item.start, item.kv_len) if item.place < 0 else (item.place,))]


def paths_of(items: Sequence[PlanItem], device: torch.device) -> TreePaths:
    """Return the paths of the rows of `items`, of which some `has_trees`."""
    paths = _paths(items)
    starts = [item.kv_len - len(path) for item, path in zip(items, paths, strict=True)]
    rows = _padded([[start, *path] for start, path in zip(starts, paths, strict=True)])
    on_device = upload(torch.tensor(rows, dtype=torch.int32), device)
    return TreePaths(starts=on_device[:, 0].contiguous(), places=on_device[:, 1:].contiguous())


def tree_rows(items: Sequence[PlanItem], *, like: Tensor) -> Tensor:
    """Return [rows, 2 + depth] int32 on the host for a decode step: place and path of each row, as of TreePaths. Rows behind `items` are padding."""
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
    """Return for each row the places of its tokens, from the first that is not at its own place on."""
    paths: list[list[int]] = []
    for i, item in enumerate(items):
        above = paths[i - item.behind] if item.draft else []
        displaced = item.place >= 0 or bool(above)
        paths.append([*above, item.start if item.place < 0 else item.place] if displaced else [])
    return paths


def _padded(rows: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows]
