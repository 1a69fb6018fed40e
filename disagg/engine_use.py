"""Requirements of a worker's role on its engine.

KV memory is of an NVLink fabric for Mooncake's `nvlink` (never run on a GPU), else any.
"""

import torch

from disagg.config import DisaggConfig
from engine.device.step_memory import EngineUse
from engine.kv.kv_pool import AllocateBytes, zeroed_bytes
from engine.kv.pool_memory import tensor_at
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.mooncake_protocols import NEEDS_FABRIC
from transfer_backends.engines.rdma_devices import devices_here
from transfer_backends.engines.trial_memory import FabricMemory


def engine_use(disagg: DisaggConfig, protocol: str | None, *, pp_size: int = 1, name: str = "worker") -> EngineUse:
    """`protocol`: Mooncake's, if used. `name`: of the rank, for files."""
    mode = disagg.disaggregation_mode
    decode = mode == "decode"
    return EngineUse(
        decodes=mode != "prefill",
        prefills=not decode,
        peers_write_pages=decode,
        kv_stays=_why_kv_stays(disagg),
        retracted_kv=disagg.disaggregation_decode_retraction_backup if decode else "recompute",
        reserve_floor=0 if mode == "encode" else disagg.num_reserved_decode_tokens,
        allocate_kv=kv_bytes_of(protocol),
        receives_features=disagg.feature_fetch and not decode and pp_size == 1,
        name=name,
    )


def _why_kv_stays(disagg: DisaggConfig) -> str:
    """Return why KV memory cannot move, or ""."""
    if not disagg.has_peers or not devices_here():
        return ""
    return "the KV memory of this worker is registered with RDMA devices, which keep its pages"


def kv_bytes_of(protocol: str | None) -> AllocateBytes:
    return fabric_bytes if protocol == NEEDS_FABRIC else zeroed_bytes


def fabric_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory until the process ends. Raises BackendUnavailable."""
    memory = FabricMemory(CudaContext(device.index or 0))
    return tensor_at(memory.allocate(size_bytes), size_bytes).zero_()
