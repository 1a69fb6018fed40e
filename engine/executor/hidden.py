"""Cuts the hidden states that a step's items request out of the batch, on the device."""

import torch
from torch import Tensor

from engine.core.plan import PlanItem


def hidden_rows(items: list[PlanItem], hidden: Tensor) -> dict[int, Tensor]:
    """hidden [T, H], item after item -> by item index [n, H] float32: the rows asked for, or one when they are pooled."""
    found, at = {}, 0
    for i, item in enumerate(items):
        if item.hidden_from is not None:
            found[i] = _pool(hidden[at + item.hidden_from - item.start : at + item.q_len].to(torch.float32), item.pool)
        at += item.q_len
    return found


def _pool(rows: Tensor, kind: str) -> Tensor:
    if kind == "last":
        return rows[-1:]
    return rows.sum(0, keepdim=True) if kind == "mean" else rows
