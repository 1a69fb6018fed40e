"""Where the tokens of a step go, and where rows of a tree of drafts find those that they see (engine/core/draft_rows.py)."""

from collections.abc import Sequence

import torch

from engine.core.plan import PlanItem
from engine.kv.step_batch import Paths
from engine.kv.upload import upload


def has_trees(items: Sequence[PlanItem]) -> bool:
    """Whether some row's KV goes elsewhere than to its own place."""
    return any(item.place >= 0 for item in items)


def places_of(items: Sequence[PlanItem]) -> list[int]:
    """Return the positions whose places take the KV of the items' tokens."""
    return [place for item in items for place in (range(item.start, item.kv_len) if item.place < 0 else (item.place,))]


def paths_of(items: Sequence[PlanItem], device: torch.device) -> Paths:
    """Return the paths of the rows of `items`, of which some `has_trees`."""
    paths: list[list[int]] = []  # of each row, the places of its tokens from the first on that has not its own
    for i, item in enumerate(items):
        above = paths[i - item.behind] if item.draft else []
        displaced = item.place >= 0 or bool(above)
        paths.append([*above, item.start if item.place < 0 else item.place] if displaced else [])
    longest = max(map(len, paths))
    starts = [item.kv_len - len(path) for item, path in zip(items, paths, strict=True)]
    padded = [path + [0] * (longest - len(path)) for path in paths]
    starts_and_places = upload(
        torch.tensor([[start, *path] for start, path in zip(starts, padded, strict=True)], dtype=torch.int32), device
    )
    return Paths(starts=starts_and_places[:, 0].contiguous(), places=starts_and_places[:, 1:].contiguous())
