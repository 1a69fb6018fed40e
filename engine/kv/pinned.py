"""Pinned host memory: mapped, touched, then registered.

torch's allocator would round up to powers of two and never free.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from engine.kv.kv_pool import zeroed_bytes

PART_BYTES = 1 << 30  # touched by one thread at a time


class MemoryRegistrar(Protocol):
    """Pins memory for the GPU; `register` raises RuntimeError or OSError."""

    def register(self, address: int, size_bytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class CudaRegistrar:
    def register(self, address: int, size_bytes: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class PinnedBytes:
    """Zeroed, pinned memory, first touched by `threads`: registration faults pages in on one core."""

    def __init__(self, size_bytes: int, *, registrar: MemoryRegistrar, threads: int) -> None:
        self.tensor = zeroed_bytes(size_bytes, torch.device("cpu"))  # [size_bytes] uint8
        self._registrar = registrar
        with ThreadPoolExecutor(threads, thread_name_prefix="prefault") as pool:
            for touched in [pool.submit(_touch(self.tensor, at)) for at in range(0, size_bytes, PART_BYTES)]:
                touched.result()
        registrar.register(self.tensor.data_ptr(), size_bytes)
        self._registered = True

    def close(self) -> None:
        """Unpin; memory ends with its last view."""
        if self._registered:
            self._registered = False
            self._registrar.unregister(self.tensor.data_ptr())


def _touch(memory: torch.Tensor, at: int) -> Callable[[], object]:
    return lambda: memory[at : at + PART_BYTES : mmap.PAGESIZE].zero_()
