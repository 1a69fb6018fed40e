"""MLA attention in plain torch, for any dtype and device: slow; the kernel's reference."""

import torch

from engine.attention.torch_backend import TorchBackend
from engine.kernels.softmax import Softmax
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.layers.latents import NewLatents


class TorchLatents:
    """One KV head with V = K, cut to the first `rank` elements of results."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._torch = TorchBackend(pool)

    def begin(self, step: StepBatch) -> None:
        self._torch.begin(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        """Return [T, heads * rank]."""
        latents = new.latents.unsqueeze(1)
        sums = self._torch.attend_turned(layer, new.q, latents, latents, Softmax(new.scale))
        return sums.view(new.q.shape)[:, :, : self._pool.specs[layer].latent].flatten(1)
