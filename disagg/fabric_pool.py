"""Where a KV pool's memory comes from: memory that machines of one NVLink fabric map, for Mooncake's protocol `nvlink`, or any.

The fabric's has never run on a GPU yet.
"""

import torch

from engine.kv.device_memory import tensor_at
from engine.kv.kv_pool import AllocateBytes, zeroed_bytes
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.fabric_memory import FabricMemory
from transfer_backends.engines.mooncake_protocols import NEEDS_FABRIC


def kv_bytes_of(protocol: str | None) -> AllocateBytes:
    """`protocol`: Mooncake's; None: another engine moves the pages."""
    return fabric_bytes if protocol == NEEDS_FABRIC else zeroed_bytes


def fabric_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate [size_bytes] uint8, zero, until the process ends. Raises BackendUnavailable."""
    memory = FabricMemory(CudaContext(device.index or 0))
    return tensor_at(memory.allocate(size_bytes), size_bytes).zero_()
