"""Behind a tower's layers: patches that a token stands for become its row."""

from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.models.vision.activations import gelu


class PatchMerger:
    """fc2(gelu(fc1(row))), a row being patches beside one another. `after`: they are normed together, not each by itself."""

    def __init__(self, norm: Norm, fc1: Linear, fc2: Linear, *, width: int, after: bool = False) -> None:
        self._norm, self._fc1, self._fc2, self._width, self._after = norm, fc1, fc2, width, after

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden of the decoder] for x [patches, hidden]."""
        rows = self._norm(x.view(-1, self._width)) if self._after else self._norm(x).view(-1, self._width)
        return self._fc2(gelu(self._fc1(rows)))
