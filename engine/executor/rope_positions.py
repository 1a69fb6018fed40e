"""RoPE positions of a step's tokens, where images have made some of them other than their places."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.kv.upload import upload


def rope_positions(items: Sequence[PlanItem], places: Tensor) -> Tensor:
    """Return [T] int64, or with tokens of images [3, T] (time, row, column). `places` [T]: of the tokens in their requests."""
    if any(item.rope is not None for item in items):
        rows: tuple[list[int], list[int], list[int]] = ([], [], [])
        for item in items:
            for row, own in zip(rows, item.rope or [_behind_images(item)] * 3, strict=True):
                row += own
        return upload(torch.tensor(rows), places.device)
    if any(item.rope_delta for item in items):
        return upload(torch.tensor([position for item in items for position in _behind_images(item)]), places.device)
    return places


def _behind_images(item: PlanItem) -> range:
    return range(item.start + item.rope_delta, item.kv_len + item.rope_delta)
