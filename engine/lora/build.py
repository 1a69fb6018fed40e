"""Chooses the LoRA implementation."""

from collections.abc import Sequence

import torch

from engine.layers.linear import SiteShape
from engine.lora.bank import AdapterBank, SlicedAdapters


def make_bank(
    sites: Sequence[SiteShape],
    *,
    grouped: bool,
    places: int,
    max_rank: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> AdapterBank:
    """The adapters on the device.

    `grouped`: Triton, also in recorded steps; needs `max_rank`. `places`: adapters per step.
    """
    if not grouped:
        return AdapterBank(SlicedAdapters())
    from engine.lora.grouped import GroupedAdapters  # triton may be missing

    assert max_rank is not None, "resolved"
    return AdapterBank(GroupedAdapters(sites, places=places, max_rank=max_rank, dtype=dtype, device=device))
