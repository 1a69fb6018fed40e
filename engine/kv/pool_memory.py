"""KV memory released while unused, and resumed zeroed at its address (engine/loop/control.py)."""

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from engine.kv.kv_pool import zeroed_bytes
from service.flags import ConfigError

TAG = "kv_cache"


class MappedMemory:
    """CPU memory whose addresses stay valid, also for a peer's kernel copies or TCP."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = tuple(buffers)

    def release(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for buffer in self._buffers:
            address, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.nbytes)
            status = libc.madvise(address, size, mmap.MADV_DONTNEED)
            assert status == 0, f"madvise: errno {ctypes.get_errno()}"

    def resume(self) -> None:
        """Do nothing: the system gives zeroed pages when they are touched."""


class SavedMemory:
    """GPU memory by torch_memory_saver. Never run on a GPU."""

    def __init__(self) -> None:
        """Raises ConfigError."""
        try:
            from torch_memory_saver import torch_memory_saver
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"--enable-memory-saver: its library cannot be imported; install it with: pip install torch-memory-saver ({error})"
            ) from None
        torch_memory_saver.hook_mode = "torch"  # the other mode needs LD_PRELOAD
        self._saver: Any = torch_memory_saver
        self._buffers: list[Tensor] = []

    def allocate(self, size_bytes: int, device: torch.device) -> Tensor:
        region: AbstractContextManager[None] = self._saver.region(tag=TAG)
        with region:
            self._buffers.append(zeroed_bytes(size_bytes, device))
        return self._buffers[-1]

    def release(self) -> None:
        self._saver.pause(TAG)

    def resume(self) -> None:
        self._saver.resume(TAG)
        for buffer in self._buffers:
            buffer.zero_()


# ---- Foreign GPU memory as a tensor. Never run on a GPU.


class DeviceBytes:
    """GPU memory for torch.as_tensor (numba's CUDA array interface, version 3)."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),  # not read-only
            "version": 3,
        }


def tensor_at(address: int, size_bytes: int) -> torch.Tensor:
    """View uint8[size_bytes]; memory must outlive the tensor."""
    return torch.as_tensor(DeviceBytes(address, size_bytes))  # no copy: torch gets the address's device from CUDA
