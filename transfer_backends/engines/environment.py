"""Environment settings of engine libraries, and silencing of their start-up output."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping

from transfer_backends.contract import BackendUnavailable


def set_defaults(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def defaults_inside(settings: Mapping[str, str]) -> Iterator[None]:
    """Set them inside the block, for a library that reads them once."""
    added = [name for name in settings if name not in os.environ]
    set_defaults(settings)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def quiet(*fds: int) -> Iterator[None]:
    """Redirect C output on `fds` to /dev/null inside the block, also in several threads."""
    with _lock:
        for fd in fds:
            _silence(fd)
    try:
        yield
    finally:
        with _lock:
            for fd in fds:
                _unsilence(fd)


_lock = threading.Lock()
_blocks: dict[int, tuple[int, int]] = {}  # by file descriptor: (copy of the original, number of silencing blocks)


def _silence(fd: int) -> None:
    if fd not in _blocks:
        _blocks[fd] = os.dup(fd), 0
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)
    copy, count = _blocks[fd]
    _blocks[fd] = copy, count + 1


def _unsilence(fd: int) -> None:
    """Restore after the last block; a second block's copy would be of /dev/null."""
    copy, count = _blocks[fd]
    if count > 1:
        _blocks[fd] = copy, count - 1
        return
    del _blocks[fd]
    os.dup2(copy, fd)
    os.close(copy)


# ---- CUDA context for threads that drive an engine.
#
# Without it UCX silently copies through the host, or crashes in cuEventQuery (openucx/ucx#11194,
# ai-dynamo/nixl#2102).

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
        """Return memory that other processes can map. Raises BackendUnavailable."""
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
