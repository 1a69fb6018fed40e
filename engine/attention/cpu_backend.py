"""CPU attention: extend by torch's SDPA over the gathered prefix, decode by the C kernel where it was built."""

import torch

from engine.attention.base import StepBatch
from engine.attention.torch_backend import TorchBackend
from engine.executor.kv_pool import KVPool
from engine.kernels.paged_decode import PagedDecode, load_paged_decode


class CpuBackend:
    """`scale` multiplies q.k (default head_dim ** -0.5). Decode results do not depend on who else is in the batch."""

    def __init__(self, pool: KVPool, *, scale: float | None = None) -> None:
        self._pool = pool
        self._scale = scale
        self._torch = TorchBackend(pool, scale=scale)
        self._kernel = _usable_kernel(pool)
        self._step: StepBatch | None = None
        self._page_table = self._kv_lens = torch.empty(0, dtype=torch.int32)

    def begin(self, step: StepBatch) -> None:
        self._step = step
        if step.extend or self._kernel is None:
            self._torch.begin(step)
            return
        self._page_table = step.page_table.to(torch.int32).contiguous()
        self._kv_lens = torch.tensor(step.kv_lens, dtype=torch.int32)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert self._step is not None, "begin() comes first"
        if self._step.extend or self._kernel is None:
            return self._torch.attend(layer, q, k, v)
        self._pool.write(layer, self._step.token_pages, self._step.token_offsets, k, v)
        scale = self._scale if self._scale is not None else q.shape[-1] ** -0.5
        out = self._kernel.run(
            q, self._pool.k(layer), self._pool.v(layer), page_table=self._page_table, kv_lens=self._kv_lens, scale=scale
        )
        return out.flatten(1)


def _usable_kernel(pool: KVPool) -> PagedDecode | None:
    """The kernel, if it was built here and takes every layer of this pool."""
    kernel = load_paged_decode()
    if kernel is not None and all(kernel.takes(spec.head_dim, spec.dtype) for spec in pool.specs):
        return kernel
    return None
