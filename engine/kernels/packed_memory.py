"""Huge-page memory for packed weights, shared by neighbours.

One thread reads huge pages 1.7 times as fast as 4 KiB pages (docs/reports/benchmarks.md); separate
matrices of some MiB would end in small pages.
"""

import contextlib
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

HUGE_BYTES = 2 << 20
LINE_BYTES = 64
RUN_BYTES = 32 << 20  # of memory shared by matrices; freed with the last of them


class PackedMemory:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """Return uninitialized uint8[size], aligned to a cache line."""
        whole = -(-size // LINE_BYTES) * LINE_BYTES
        if whole > RUN_BYTES // 2:
            return _mapped(size)
        with self._lock:
            if whole > len(self._rest):
                self._rest = _mapped(RUN_BYTES)
            piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


class HugePages:
    """Uninitialized huge pages, if available; written pages become resident."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._begin = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % HUGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages is slower, not wrong
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._begin, size // HUGE_BYTES * HUGE_BYTES)

    def lend(self) -> memoryview:
        """Return a view that keeps the region alive."""
        return memoryview(self._memory)[self._begin : self._begin + self.size]


def _mapped(size: int) -> Tensor:
    return torch.frombuffer(HugePages(size).lend(), dtype=torch.uint8)


MAX_FREE_BYTES = 512 << 20  # kept for later tensors of these sizes


class Staging:
    """Allocator that reuses memory after its last tensor. Single-threaded.

    The OS clears pages at the first write, which takes as long as a copy.
    """

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
        if self._free_bytes + region.size <= MAX_FREE_BYTES:
            self._free[region.size].append(region)
            self._free_bytes += region.size
