"""Reused huge pages for temporary tensors.

The OS clears pages at the first write, which takes as long as a copy.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from engine.kernels.packed_memory import HUGE_BYTES, HugePages

MOST_FREE_BYTES = 512 << 20  # kept for later tensors of these sizes


class Staging:
    """Allocator that reuses memory after its last tensor. Single-threaded."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[HugePages]] = defaultdict(list)
        self._free_bytes = 0

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Like `torch.empty`, in huge pages for large CPU tensors."""
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
