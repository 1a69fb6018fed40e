"""KV pool memory: of an NVLink fabric for Mooncake's `nvlink` (never run on a GPU), else any."""

import torch

from engine.kv.kv_pool import AllocateBytes, zeroed_bytes
from engine.kv.pool_memory import tensor_at
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.mooncake_protocols import NEEDS_FABRIC
from transfer_backends.engines.trial_memory import FabricMemory


def kv_bytes_of(protocol: str | None) -> AllocateBytes:
    return fabric_bytes if protocol == NEEDS_FABRIC else zeroed_bytes


def fabric_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory until the process ends. Raises BackendUnavailable."""
    memory = FabricMemory(CudaContext(device.index or 0))
    return tensor_at(memory.allocate(size_bytes), size_bytes).zero_()
