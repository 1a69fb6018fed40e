"""The interface of a vision tower, and its features in a step."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.model_files.tower_config import CHANNELS, ImageProcessing, TowerConfig


class Pixels(NamedTuple):
    """uint8 [frames, height, width, 3]; `grid`: (time, rows, columns) of patches."""

    pixels: Tensor
    grid: tuple[int, int, int]


class VisionTower(Protocol):
    """Encodes an image to features: an embedding, then deepstack, per token.

    One by one, for equal KV in any batch.
    """

    feature_size: int

    def encode(self, image: Pixels) -> Tensor:
        """[tokens, feature_size] in the model's dtype and device."""


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


StepImages = tuple[ImageRows, ...]  # of a step: its image tokens, if there are any
NO_IMAGES: StepImages = ()

# ---- Pixels as scaled rows of patches.


class Patches:
    """A row is a patch by channel and frame; patches to merge are consecutive."""

    def __init__(
        self, tower: TowerConfig, processing: ImageProcessing, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tower, self._dtype, self._device = tower, dtype, device
        mean, std = (
            torch.tensor(of, dtype=torch.float32, device=device).view(CHANNELS, 1)
            for of in (processing.mean, processing.std)
        )
        self._scale, self._shift = processing.rescale / std, -mean / std

    def __call__(self, image: Pixels) -> Tensor:
        rows = self._cut(image).to(self._device)
        values = rows.view(len(rows), CHANNELS, -1).float().mul_(self._scale).add_(self._shift)
        return values.view(len(rows), -1).to(self._dtype)

    def _cut(self, image: Pixels) -> Tensor:
        of, (time, rows, columns) = self._tower, image.grid
        frames = image.pixels
        if missing := time * of.temporal_patch - len(frames):
            frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))  # repeat the last frame
        assert frames.shape == (time * of.temporal_patch, rows * of.patch, columns * of.patch, CHANNELS), frames.shape
        sides = rows // of.merge, of.merge, of.patch, columns // of.merge, of.merge, of.patch
        blocks = frames.reshape(time, of.temporal_patch, *sides, CHANNELS)
        return blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(time * rows * columns, -1)


def places(rows: int, columns: int, *, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column [rows * columns] i64 of each patch, in the order of `Patches`."""
    blocks = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    order = blocks.transpose(1, 2).flatten()
    return order // columns, order % columns
