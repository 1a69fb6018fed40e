"""Data parallelism of the vision tower: one rank of the first stage encodes an image, and the others receive its features.

The tower is whole on each rank and computes images one by one, so features do not depend on the rank that computes them. After
SGLang's and vLLM's.
"""

import heapq
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from engine.images import ImageInput
from engine.models.vision.tower import Pixels, VisionTower
from engine.parallel.collectives import Collectives


class EncoderRanks:
    """`dtype`, `device`: of features. `pixels`: of an image, on the device."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, pixels: Callable[[ImageInput], Pixels]) -> None:
        self._dtype, self._device = dtype, device
        self._pixels = pixels

    def encode(self, tower: VisionTower, images: Sequence[ImageInput], ranks: Collectives) -> list[Tensor]:
        """[num_tokens, feature size] of each of `images`, the same on all `ranks`, which call it with the same images.

        Raises torch.OutOfMemoryError; the others then wait until the group ends, as for any part of a step.
        """
        owners = deal([prod(image.grid) for image in images], ranks.size)
        mine = [image for image, owner in zip(images, owners, strict=True) if owner == ranks.rank]
        encoded = iter(tower.encode([self._pixels(image) for image in mine]))
        found = []
        for image, owner in zip(images, owners, strict=True):
            features = next(encoded).contiguous() if owner == ranks.rank else self._room(image, tower)
            ranks.share(features, owner=owner)
            found.append(features)
        return found

    def _room(self, image: ImageInput, tower: VisionTower) -> Tensor:
        return torch.empty((image.num_tokens, tower.feature_size), dtype=self._dtype, device=self._device)


def deal(weights: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each piece, alike on every rank, so that none has to ask.

    The heaviest piece goes first, each to the rank that has least so far (LPT: Graham, "Bounds on multiprocessing timing
    anomalies", 1969): the busiest rank has at most 4/3 - 1/(3 ranks) of what it has in the best division. Of equal pieces the
    first goes first, of equal ranks the lowest takes it.
    """
    owners = [0] * len(weights)
    loads = [(0, rank) for rank in range(ranks)]
    for piece in sorted(range(len(weights)), key=lambda piece: -weights[piece]):
        load, rank = loads[0]
        owners[piece] = rank
        heapq.heapreplace(loads, (load + weights[piece], rank))
    return owners
