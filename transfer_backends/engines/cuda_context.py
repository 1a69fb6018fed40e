"""CUDA context for threads that drive an engine.

Without it UCX silently copies through the host, or crashes in cuEventQuery (openucx/ucx#11194,
ai-dynamo/nixl#2102).
"""

import ctypes
import threading

from transfer_backends.contract import BackendUnavailable

LIBRARY = "libcuda.so.1"


class CudaContext:
    """Primary context of a device. Raises BackendUnavailable."""

    def __init__(self, ordinal: int, *, library: str = LIBRARY) -> None:
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise BackendUnavailable(
                f"KV cache on cuda:{ordinal}: the CUDA driver cannot be loaded ({error})"
            ) from None
        self.ordinal = ordinal
        self._here = threading.local()
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def enter(self) -> None:
        if not getattr(self._here, "entered", False):
            self._call("cuCtxSetCurrent", self._context)
            self._here.entered = True

    def allocate(self, size_bytes: int) -> int:
        """Other processes can map it. Raises BackendUnavailable."""
        self.enter()
        at = ctypes.c_void_p()
        self._call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size_bytes))
        assert at.value is not None
        return at.value

    def free(self, address: int) -> None:
        self.enter()
        self._call("cuMemFree_v2", ctypes.c_void_p(address))

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._driver, name)(*args)
        if status != 0:
            raise BackendUnavailable(f"KV cache on cuda:{self.ordinal}: {name} failed with CUDA error {status}")
