"""Memory of weights: huge pages, which neighbours share where matrices are packed.

One thread reads huge pages about 1.7 times as fast as pages of 4 KiB (docs/reports/benchmarks.md). A matrix of some MiB alone would end
in small ones, and integers make many of that size.
"""

import contextlib
import mmap
import threading

import torch
from torch import Tensor

HUGE_BYTES = 2 << 20
LINE_BYTES = 64
RUN_BYTES = 32 << 20  # of memory that matrices share; it is given back when the last of them is gone


class PackedMemory:
    """Gives memory out piece by piece. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """[size] uint8, of any content, aligned to a cache line, in huge pages where the kernel has some."""
        whole = -(-size // LINE_BYTES) * LINE_BYTES
        if whole > RUN_BYTES // 2:
            return _mapped(size)
        with self._lock:
            if whole > len(self._rest):
                self._rest = _mapped(RUN_BYTES)
            piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


class HugePages:
    """`size` bytes of any content, in huge pages where the kernel has some; they become real where they are written."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._begin = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % HUGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._begin, size // HUGE_BYTES * HUGE_BYTES)

    def lend(self) -> memoryview:
        """Return them; the region lives as long as this view, and as what stands on it."""
        return memoryview(self._memory)[self._begin : self._begin + self.size]


def _mapped(size: int) -> Tensor:
    return torch.frombuffer(HugePages(size).lend(), dtype=torch.uint8)
