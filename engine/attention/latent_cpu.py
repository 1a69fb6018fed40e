"""Latent attention on a CPU, by the C kernel."""

import torch

from engine.kernels.latent_attention import LatentKernel
from engine.kv.step_batch import StepBatch
from engine.layers.latents import NewLatents


class CpuLatents:
    """Prompts and answers alike: KV of an answer has the same bits when it is computed again, as a prompt."""

    def __init__(self, kernel: LatentKernel) -> None:
        self._kernel = kernel

    def begin(self, step: StepBatch) -> None:
        self._kernel.begin(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        """[T, heads * rank]."""
        return self._kernel.attend(layer, new.q, new.latents, scale=new.scale)
