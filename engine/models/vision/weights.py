"""Loads layers of a vision tower, replicated, as floats."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.models.checkpoint import Checkpoint
from engine.parallel.layout import Extent


class VisionWeights:
    """Tensors under `prefix`, without ".weight" and ".bias"."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    @property
    def dtype(self) -> torch.dtype:
        return self._checkpoint.dtype

    @property
    def device(self) -> torch.device:
        return self._checkpoint.device

    def inside(self, prefix: str) -> "VisionWeights":
        return VisionWeights(self._checkpoint, self._prefix + prefix)

    def tensor(self, name: str, shape: Sequence[Extent], *, dtype: torch.dtype | None = None) -> Tensor:
        return self._checkpoint.take(self._prefix + name, shape, dtype=dtype)

    def linear(
        self, names: Sequence[str], outputs: int, inputs: int, *, bias: bool = True, gates: bool = False
    ) -> Linear:
        """Load matrices [outputs, inputs] each, concatenated."""
        full, rows = [self._prefix + name for name in names], [outputs] * len(names)
        weight = self._checkpoint.take_rows([f"{name}.weight" for name in full], rows, [inputs])
        vector = self._checkpoint.take_rows([f"{name}.bias" for name in full], rows, []) if bias else None
        return Linear(weight, vector, gates=gates)

    def convolution(self, name: str, shape: Sequence[int], *, bias: bool) -> Linear:
        """Load a patch embedding as linear layer. `shape`: [outputs, values of a patch ...]."""
        weight = self.tensor(f"{name}.weight", shape).flatten(1)
        return Linear(weight, self.tensor(f"{name}.bias", shape[:1]) if bias else None)

    def rms_norm(self, name: str, width: int, *, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", [width]), eps=eps)

    def layer_norm(self, name: str, width: int, *, eps: float) -> LayerNorm:
        return LayerNorm(self.tensor(f"{name}.weight", [width]), self.tensor(f"{name}.bias", [width]), eps=eps)

    def ignore(self, name: str) -> None:
        self._checkpoint.ignore(self._prefix + name)
