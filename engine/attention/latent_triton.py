"""MLA attention by Triton, also for captured steps."""

import torch

from engine.attention.triton_backend import TritonBackend
from engine.kernels.paged_attention import Softmax
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch
from engine.layers.latents import NewLatents


class TritonLatents:
    """One KV head; V is the first elements of K."""

    def __init__(self, pool: KVPool, *, num_heads: int) -> None:
        self._pool = pool
        self._triton = TritonBackend(pool, num_heads=num_heads)
        self._token_pages = self._token_offsets = torch.empty(0, dtype=torch.int64)

    def begin(self, step: StepBatch) -> None:
        self._triton.begin(step)
        self._take(step)

    def begin_on_device(self, step: DeviceStep | DeviceExtend) -> None:
        self._triton.begin_on_device(step)
        self._take(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        """Return [T, heads * rank]."""
        latents = new.latents.unsqueeze(1)
        self._pool.write(layer, self._token_pages, self._token_offsets, latents, latents)
        return self._triton.attend_written(layer, new.q.contiguous(), Softmax(new.scale))

    def _take(self, step: StepBatch | DeviceStep | DeviceExtend) -> None:
        self._token_pages, self._token_offsets = step.token_pages, step.token_offsets
