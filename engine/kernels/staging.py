"""Memory for what is computed or packed, and dropped, tensor after tensor: huge pages that are used again.

The kernel clears each page that a process writes for the first time, which takes as long as a copy (pages of 4 KiB: several
times as long). Layers repeat, and so do the sizes of their matrices, and of what a step of many rows computes in them.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from engine.kernels.packed_memory import HUGE_BYTES, HugePages

MOST_FREE_BYTES = 512 << 20  # kept for the next tensors of their size


class Staging:
    """Tensors whose memory comes back when the last one in it is gone. Of one thread."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[HugePages]] = defaultdict(list)
        self._free_bytes = 0

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.empty`, in huge pages on a CPU, if it is large. A tensor may also stay."""
        count = prod(shape)
        size = count * dtype.itemsize
        if device.type != "cpu" or size < HUGE_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        region = self._region(-(-size // HUGE_BYTES) * HUGE_BYTES)
        lent = region.lend()
        weakref.finalize(lent, self._take_back, region).atexit = False
        return torch.frombuffer(lent, dtype=dtype, count=count).view(*shape)

    def close(self) -> None:
        self._free.clear()
        self._free_bytes = 0

    def _region(self, size: int) -> HugePages:
        if not (free := self._free.get(size)):
            return HugePages(size)
        self._free_bytes -= size
        return free.pop()

    def _take_back(self, region: HugePages) -> None:
        if self._free_bytes + region.size <= MOST_FREE_BYTES:
            self._free[region.size].append(region)
            self._free_bytes += region.size
