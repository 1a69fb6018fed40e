"""Kernel for page checksums on a device (engine/kv/page_checksum.py)."""

from importlib.util import find_spec

import torch

from engine.kv.page_checksum import PageSums


def page_sums_for(device: torch.device) -> PageSums | None:
    """Return None without a GPU: torch operators."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from engine.kernels.triton.checksum import page_sums

    return page_sums
