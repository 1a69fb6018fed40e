"""What an executor knows of a vision tower."""

from collections.abc import Sequence
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
