"""Scratch memory for trial writes, of the pool's own kind, since that decides the transport."""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np

from transfer_backends.contract import BackendUnavailable, Pieces, Region
from transfer_backends.engines.cuda_context import CudaContext

HOST_BYTES = 4 << 20  # a millisecond over CMA, a few over TCP
GPU_BYTES = 64 << 20  # 0.2 ms over NVLink


class TrialMemory:
    """Touched once to keep page faults out of measurements."""

    def __init__(self, device: int | None, memory: "CudaContext | FabricMemory | None") -> None:
        """Raises `BackendUnavailable`."""
        self._memory = memory
        if memory is not None:
            self.region = Region(memory.allocate(GPU_BYTES), 1, GPU_BYTES, device)
        else:
            self._bytes = np.ones(HOST_BYTES, np.uint8)
            self.region = Region(self._bytes.ctypes.data, 1, HOST_BYTES, None)

    def close(self) -> None:
        """The host's ends with this object."""
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


ALLOCATOR = "nvlink_allocator.so"
WITH_FABRIC = 1  # the probe's result for cuMemCreate with a fabric handle
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "mc_allocator_probe": (ctypes.c_int, (ctypes.c_int,)),
    "mc_allocator_malloc": (ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)),
    "mc_allocator_free": (None, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)),
}


class FabricMemory:
    """GPU memory with fabric handles. Raises BackendUnavailable without Mooncake's allocator.

    Never run on a GPU. Machines of one NVLink fabric can map it, unlike memory of cudaMalloc.
    """

    def __init__(self, context: CudaContext, *, library: str | None = None) -> None:
        try:
            self._library = ctypes.CDLL(library or _installed())
            for name, (result, arguments) in FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(
                f"memory for NVLink fabrics: Mooncake's {ALLOCATOR} cannot be used ({error})"
            ) from None
        self._context = context
        self._ordinal = context.ordinal

    def is_there(self) -> bool:
        self._context.enter()
        return bool(self._library.mc_allocator_probe(self._ordinal) == WITH_FABRIC)

    def allocate(self, size_bytes: int) -> int:
        """Not zeroed. Raises BackendUnavailable."""
        self._context.enter()
        at = self._library.mc_allocator_malloc(size_bytes, self._ordinal, None)
        if not at:
            raise BackendUnavailable(f"memory for NVLink fabrics: cuda:{self._ordinal} has no {size_bytes} bytes left")
        return int(at)

    def free(self, address: int) -> None:
        self._context.enter()
        self._library.mc_allocator_free(address, 0, self._ordinal, None)


def _installed() -> str:
    found = importlib.util.find_spec("mooncake")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return str(Path(folders[0], ALLOCATOR)) if folders else ALLOCATOR
