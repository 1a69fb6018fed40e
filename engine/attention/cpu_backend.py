"""CPU attention: extend by torch's SDPA over the gathered pages, decode by the C kernel where it was built."""

import torch

from engine.attention.base import AttentionBackend, StepBatch
from engine.attention.torch_backend import TorchBackend
from engine.executor.kv_pool import KVPool
from engine.kernels.paged_decode import make_paged_decode


class CpuBackend:
    """`scale` multiplies q.k (default head_dim ** -0.5). Decode results do not depend on who else is in the batch."""

    def __init__(self, pool: KVPool, *, scale: float | None = None) -> None:
        self._torch = TorchBackend(pool, scale=scale)
        self._decode = make_paged_decode(pool, scale=scale)
        self._now: AttentionBackend = self._torch

    @property
    def has_kernel(self) -> bool:
        """Whether decode runs by the C kernel (else by torch, several times slower)."""
        return self._decode is not None

    def begin(self, step: StepBatch) -> None:
        self._now = self._torch if step.extend or self._decode is None else self._decode
        self._now.begin(step)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._now.attend(layer, q, k, v)
