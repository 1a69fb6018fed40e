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


def tensor_at(address: int, size_bytes: int) -> torch.Tensor:
    """Return the memory as [size_bytes] uint8 on its own device; it has to stay for as long as the tensor."""
    return torch.as_tensor(DeviceBytes(address, size_bytes))  # no copy: torch asks CUDA what device the address is on
