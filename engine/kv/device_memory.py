"""GPU memory that torch did not allocate, as a tensor. Never run on a GPU yet."""

import torch


class DeviceBytes:
    """`size_bytes` of a GPU from `address`, as torch.as_tensor reads it (numba's CUDA array interface, version 3)."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),  # not read-only
            "version": 3,
        }


def tensor_at(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the memory as [size_bytes] uint8, which it stays for as long as the process lives."""
    return torch.as_tensor(DeviceBytes(address, size_bytes), device=device)
