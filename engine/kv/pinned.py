"""Host memory that a GPU reads and writes by itself: mapped, touched, then registered as it is.

torch's own pinned allocator rounds each block up to a power of two and never gives it back.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from engine.kv.kv_pool import zeroed_bytes

PART_BYTES = 1 << 30  # that one thread touches at a time


class MemoryRegistrar(Protocol):
    """Pins mapped memory for the GPU. `register` raises RuntimeError or OSError."""

    def register(self, address: int, size_bytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class CudaRegistrar:
    """cudaHostRegister of the CUDA runtime that torch runs on."""

    def register(self, address: int, size_bytes: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class PinnedBytes:
    """`size_bytes` of zeroed, pinned memory. `threads` touch it first: to register untouched memory faults it in on one core."""

    def __init__(self, size_bytes: int, *, registrar: MemoryRegistrar, threads: int) -> None:
        self.tensor = zeroed_bytes(size_bytes, torch.device("cpu"))  # [size_bytes] uint8
        self._registrar = registrar
        with ThreadPoolExecutor(threads, thread_name_prefix="prefault") as pool:
            for touched in [pool.submit(_touch(self.tensor, at)) for at in range(0, size_bytes, PART_BYTES)]:
                touched.result()
        registrar.register(self.tensor.data_ptr(), size_bytes)
        self._registered = True

    def close(self) -> None:
        """Unpin it, once. The memory itself goes with its last view."""
        if self._registered:
            self._registered = False
            self._registrar.unregister(self.tensor.data_ptr())


def _touch(memory: torch.Tensor, at: int) -> Callable[[], object]:
    """Write to each memory page of a part; torch lets other threads run meanwhile."""
    return lambda: memory[at : at + PART_BYTES : mmap.PAGESIZE].zero_()
