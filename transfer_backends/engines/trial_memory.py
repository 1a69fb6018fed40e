"""Scratch memory for trial writes, of the pool's own kind, since that decides the transport."""

from typing import Protocol

import numpy as np

from transfer_backends.contract import Pieces, Region

HOST_BYTES = 4 << 20  # a millisecond over CMA, a few over TCP
GPU_BYTES = 64 << 20  # 0.2 ms over NVLink


class GpuAllocator(Protocol):
    """Interface of `CudaContext` and `FabricMemory`."""

    def allocate(self, size_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...


class TrialMemory:
    """Scratch memory, touched once to keep page faults out of measurements."""

    def __init__(self, device: int | None, memory: GpuAllocator | None) -> None:
        """Raises `BackendUnavailable`."""
        self._memory = memory
        if memory is not None:
            self.region = Region(memory.allocate(GPU_BYTES), 1, GPU_BYTES, device)
        else:
            self._bytes = np.ones(HOST_BYTES, np.uint8)
            self.region = Region(self._bytes.ctypes.data, 1, HOST_BYTES, None)

    def close(self) -> None:
        """Free a GPU's memory; the host's ends with this object."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.free(self.region.base_ptr)


def trial_pieces(mine: Region, theirs: Region, *, max_piece_bytes: int = GPU_BYTES) -> Pieces:
    size = min(mine.size_bytes, theirs.size_bytes)
    at = np.arange(0, size, max_piece_bytes, dtype=np.uint64)
    return Pieces(
        src=np.uint64(mine.base_ptr) + at,
        dst=np.uint64(theirs.base_ptr) + at,
        lengths=np.minimum(np.uint64(size) - at, np.uint64(max_piece_bytes)),
        src_device=mine.device,
        dst_device=theirs.device,
    )
