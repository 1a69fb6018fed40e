"""Vision data parallelism: one first-stage rank encodes an image, and broadcasts features.

Each rank has the whole tower and encodes images one by one. After SGLang's and vLLM's.
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
    def __init__(self, *, dtype: torch.dtype, device: torch.device, pixels: Callable[[ImageInput], Pixels]) -> None:
        self._dtype, self._device = dtype, device
        self._pixels = pixels

    def encode(self, tower: VisionTower, images: Sequence[ImageInput], ranks: Collectives) -> list[Tensor]:
        """Return each image's [num_tokens, feature size] on all `ranks`.

        Raises torch.OutOfMemoryError; other ranks then wait for the group's end.
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
    """Assign pieces to ranks without communication.

    Largest first, to the least loaded rank (LPT: Graham, "Bounds on multiprocessing timing
    anomalies", 1969): at most 4/3 - 1/(3 ranks) of the optimum. Ties go by number.
    """
    owners = [0] * len(weights)
    loads = [(0, rank) for rank in range(ranks)]
    for piece in sorted(range(len(weights)), key=lambda piece: -weights[piece]):
        load, rank = loads[0]
        owners[piece] = rank
        heapq.heapreplace(loads, (load + weights[piece], rank))
    return owners
