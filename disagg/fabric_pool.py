"""A KV pool in memory that machines of one NVLink fabric map, for Mooncake's protocol `nvlink`. Never run on a GPU yet."""

import torch

from engine.kv.device_memory import tensor_at
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.fabric_memory import FabricMemory


def fabric_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate [size_bytes] uint8, zero, until the process ends. Raises BackendUnavailable."""
    memory = FabricMemory(CudaContext(device.index or 0))
    return tensor_at(memory.allocate(size_bytes), size_bytes).zero_()
