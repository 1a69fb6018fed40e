"""MLA attention on CPU by the C kernel."""

import torch

from engine.kernels.latent_attention import LatentKernel
from engine.kv.step_batch import StepBatch
from engine.layers.latents import NewLatents


class CpuLatents:
    """Prompts and decodes alike: recomputed KV has the same bits."""

    def __init__(self, kernel: LatentKernel) -> None:
        self._kernel = kernel

    def begin(self, step: StepBatch) -> None:
        self._kernel.begin(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        """Return [T, heads * rank]."""
        return self._kernel.attend(layer, new.q, new.latents, scale=new.scale)
