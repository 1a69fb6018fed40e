"""What an executor knows of a vision tower, and what a step takes of its features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Pixels(NamedTuple):
    """uint8 [frames, height, width, 3], on any device; `grid`: (time, rows, columns) of its patches."""

    pixels: Tensor
    grid: tuple[int, int, int]


class VisionTower(Protocol):
    """A row of features: the embedding of a token, and behind it what is added to the states behind the first layers (deepstack).

    Images are computed one by one: the features of an image do not depend on what is encoded with it, so equal images have equal KV.
    """

    feature_size: int

    def encode(self, images: Sequence[Pixels]) -> list[Tensor]:
        """[tokens, feature_size] of each of `images`, in the model's type on its device."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The tokens of a step that stand for parts of images, and what stands in for their embeddings.

    `rows` [n] int64, each once: of the step's tokens. `features` [n, feature size]: of them, as a `VisionTower` gives them.
    """

    rows: Tensor
    features: Tensor

    def embedded(self, hidden: Tensor) -> Tensor:
        """`hidden` [T, size], whose `rows` become the embeddings in `features`, in place."""
        return hidden.index_copy_(0, self.rows, self._part(0, hidden))

    def deepened(self, delta: Tensor, level: int) -> Tensor:
        """`delta` [T, size] with level `level` (0, 1, ...) of the features added to its `rows`: a new tensor."""
        return delta.index_add(0, self.rows, self._part(1 + level, delta))

    def _part(self, number: int, like: Tensor) -> Tensor:
        size = like.shape[1]
        return self.features[:, number * size : (number + 1) * size].to(like.dtype)
