"""Allocates memory that the system may back by huge pages.

One thread reads such memory about 1.7 times as fast as memory of 4 KiB pages (docs/reports/benchmarks.md).
"""

import contextlib
import mmap

import torch

HUGE_BYTES = 2 << 20
LINE_BYTES = 64


def allocate(size: int) -> torch.Tensor:
    """[size] uint8, of any content, aligned to a cache line. Whole huge pages of it are advised; the rest stays in small ones."""
    if size < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _aligned(torch.empty(size + LINE_BYTES, dtype=torch.uint8), size, LINE_BYTES)
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = _aligned(torch.frombuffer(memory, dtype=torch.uint8), size, HUGE_BYTES)
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE, int(whole.storage_offset()), size // HUGE_BYTES * HUGE_BYTES)
    return whole


def _aligned(memory: torch.Tensor, size: int, alignment: int) -> torch.Tensor:
    begin = -memory.data_ptr() % alignment
    return memory[begin : begin + size]
