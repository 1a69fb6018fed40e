"""Foreign GPU memory as a tensor. Never run on a GPU."""

import torch


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
