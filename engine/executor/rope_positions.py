"""RoPE positions of a step's tokens, where images have made some of them other than their places."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.kv.upload import upload


def rope_positions(items: Sequence[PlanItem], places: Tensor) -> Tensor:
    """Return [T] int64, or with tokens of images [3, T] (time, row, column). `places` [T]: of the tokens in their requests."""
    if all(item.images is None for item in items):
        return places
    ropes = [None if item.images is None else item.images.rope for item in items]
    if not any(ropes):
        return upload(torch.tensor([position for item in items for position in _one_by_one(item)]), places.device)
    rows: tuple[list[int], list[int], list[int]] = ([], [], [])
    for item, rope in zip(items, ropes, strict=True):
        for row, own in zip(rows, rope or [_one_by_one(item)] * 3, strict=True):
            row += own
    return upload(torch.tensor(rows), places.device)


def _one_by_one(item: PlanItem) -> range:
    delta = 0 if item.images is None else item.images.rope_delta
    return range(item.start + delta, item.kv_len + delta)
