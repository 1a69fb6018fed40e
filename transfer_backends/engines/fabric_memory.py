"""GPU memory with fabric handles, from Mooncake's CUDA allocator. Never run on a GPU.

Machines of one NVLink fabric can map it, unlike memory of cudaMalloc.
"""

import ctypes
import importlib.util
from pathlib import Path

from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.cuda_context import CudaContext

ALLOCATOR = "nvlink_allocator.so"
WITH_FABRIC = 1  # the probe's result for cuMemCreate with a fabric handle
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "mc_allocator_probe": (ctypes.c_int, (ctypes.c_int,)),
    "mc_allocator_malloc": (ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)),
    "mc_allocator_free": (None, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)),
}


class FabricMemory:
    """Raises BackendUnavailable without Mooncake's allocator."""

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
        """Return new memory, not zeroed. Raises BackendUnavailable."""
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
