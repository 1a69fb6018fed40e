"""The interface of a vision tower, and its features in a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Pixels(NamedTuple):
    """uint8 [frames, height, width, 3]; `grid`: (time, rows, columns) of patches."""

    pixels: Tensor
    grid: tuple[int, int, int]


class VisionTower(Protocol):
    """Encodes images to features: an embedding, then deepstack, per token.

    One by one, so that equal images have equal KV in any batch.
    """

    feature_size: int

    def encode(self, images: Sequence[Pixels]) -> list[Tensor]:
        """[tokens, feature_size] per image, in the model's dtype and device."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Image tokens of a step: unique `rows` [n] i64, `features` [n, feature_size]."""

    rows: Tensor
    features: Tensor

    def embedded(self, hidden: Tensor) -> Tensor:
        """Write the embeddings into `hidden` [T, size], in place."""
        return hidden.index_copy_(0, self.rows, self._part(0, hidden))

    def deepened(self, delta: Tensor, level: int) -> Tensor:
        """`delta` [T, size] plus deepstack features of `level` (0, 1, ...), a new tensor."""
        return delta.index_add(0, self.rows, self._part(1 + level, delta))

    def _part(self, number: int, like: Tensor) -> Tensor:
        size = like.shape[1]
        return self.features[:, number * size : (number + 1) * size].to(like.dtype)
