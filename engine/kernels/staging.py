"""Memory for what is packed and dropped, tensor after tensor: huge pages that are used again.

The kernel clears each page that a process writes for the first time, which takes as long as the copy (pages of 4 KiB: several
times as long). Layers repeat, and so do the sizes of their matrices.
"""

import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from engine.kernels.packed_memory import HUGE_BYTES, HugePages

MOST_FREE_BYTES = 512 << 20  # kept for the next tensor of their size


class Staging:
    """Tensors whose memory comes back when the last one in it is gone. Of one thread."""

    def __init__(self) -> None:
        self._free: dict[int, HugePages] = {}

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.empty`, in huge pages on a CPU, if it is large. A tensor may also stay."""
        size = prod(shape) * dtype.itemsize
        if device.type != "cpu" or size < HUGE_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        region = self._free.pop(size, None) or HugePages(size)
        lent = region.lend()
        weakref.finalize(lent, self._take_back, region).atexit = False
        return torch.frombuffer(lent, dtype=dtype).view(*shape)

    def close(self) -> None:
        self._free.clear()

    def _take_back(self, region: HugePages) -> None:
        if sum(self._free) + region.size <= MOST_FREE_BYTES:
            self._free[region.size] = region
