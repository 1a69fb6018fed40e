"""Huge-page memory for packed weights, shared by neighbours.

One thread reads huge pages 1.7 times as fast as 4 KiB pages (docs/reports/benchmarks.md); separate
matrices of some MiB would end in small pages.
"""

import contextlib
import mmap
import threading

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
