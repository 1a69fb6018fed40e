"""Packed integers of GGUF tensors with groups of 32."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.quant.ggml import BLOCK_TYPES, GROUP, integers_of
from engine.quant.integers import Integers, columns_of

if TYPE_CHECKING:
    from engine.gguf.tensors import GGUFTensors


class PackedGGUF:
    """A `GGUFTensors` that also returns packed integers."""

    def __init__(self, tensors: "GGUFTensors") -> None:
        self._tensors = tensors
        self.described_by = tensors.described_by

    def names(self) -> set[str]:
        return self._tensors.names()

    def where(self, name: str) -> str:
        return self._tensors.where(name)

    def open(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Callable[[Tensor], object]:
        return self._tensors.open(name, shape, taken)

    def integers(self, name: str, shape: Sequence[int], taken: Sequence[range], dtype: torch.dtype) -> Integers | None:
        """The `taken` part of a matrix; None if type or cut does not fit groups."""
        kind, columns = BLOCK_TYPES.get(self._tensors.type_of(name)), taken[1]
        if kind is None or columns.start % GROUP or columns.stop % GROUP:
            return None
        blocks, place = self._tensors.blocks(name, shape, taken)
        whole = integers_of(kind, blocks, dtype)
        return whole if len(columns) == whole.shape[1] else columns_of(whole, place)

    def close(self) -> None:
        self._tensors.close()
