"""Strided host rows to the GPU in one operation (cuMemcpy2DAsync).

torch would gather them on the host first, synchronously.
"""

import ctypes

import torch
from torch import Tensor

LIBRARY = "libcuda.so.1"
HOST, DEVICE = 1, 2  # CUmemorytype


class _Copy2D(ctypes.Structure):
    _fields_ = [
        ("src_x_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_void_p),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_void_p),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class CudaRows:
    """Raises OSError without a CUDA driver."""

    def __init__(self, *, library: str = LIBRARY) -> None:
        self._copy_2d = ctypes.CDLL(library).cuMemcpy2DAsync_v2
        self._copy_2d.argtypes = [ctypes.POINTER(_Copy2D), ctypes.c_void_p]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue pinned `source` to GPU `target`, [rows, words]."""
        self.copy_on(torch.cuda.current_stream().cuda_stream, target, source)

    def copy_on(self, stream: int, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert target.stride(1) == source.stride(1) == 1
        size = source.element_size()
        copy = _Copy2D(
            src_type=HOST,
            src_host=source.data_ptr(),
            src_pitch=source.stride(0) * size,
            dst_type=DEVICE,
            dst_device=target.data_ptr(),
            dst_pitch=target.stride(0) * size,
            width_bytes=source.shape[1] * size,
            height=source.shape[0],
        )
        status = self._copy_2d(ctypes.byref(copy), stream)
        if status != 0:
            raise RuntimeError(f"host tier: cuMemcpy2DAsync failed with CUDA error {status}")
