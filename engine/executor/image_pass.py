"""The images of steps: features that the vision tower computes, kept by key until a plan forgets them, and the rows that they are put in.

A step that fails has perhaps encoded nothing. One in flight behind it that counts on its features fails like it, and no other:
the scheduler has later ones encode again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.plan import Plan, PlanItem
from engine.executor.encoder_ranks import EncoderRanks
from engine.images import ImageInput
from engine.kv.upload import upload
from engine.model_files.tower_config import CHANNELS
from engine.models.decoder import DenseDecoder
from engine.models.image_rows import ImageRows
from engine.models.vision.tower import Pixels


class ImagePass:
    """Calls come in stream order. `shares`: the ranks of the stage share the images of a step; else each encodes all."""

    def __init__(self, device: torch.device, *, dtype: torch.dtype, shares: bool = False) -> None:
        self._device = device
        self._ranks = EncoderRanks(dtype=dtype, device=device, pixels=self._pixels) if shares else None
        self._features: dict[bytes, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(features.nbytes for features in self._features.values())

    def forget_all(self) -> None:
        """The next step may be another model's."""
        self._features = {}

    def run(self, model: DenseDecoder, plan: Plan) -> None:
        """Forget and encode what `plan` says. Raises torch.OutOfMemoryError."""
        for key in plan.forgets:
            self._features.pop(key, None)
        if plan.encodes:
            encoded = self._encoded(model, plan.encodes)
            self._features.update(zip((image.key for image in plan.encodes), encoded, strict=True))

    def _encoded(self, model: DenseDecoder, images: Sequence[ImageInput]) -> list[Tensor]:
        assert model.vision is not None, "images for a model without a tower"
        if self._ranks is not None and model.collectives is not None:
            return self._ranks.encode(model.vision, images, model.collectives)
        return model.vision.encode([self._pixels(image) for image in images])

    def rows(self, items: Sequence[PlanItem]) -> ImageRows | None:
        """Return the rows of a step of `items` that are parts of images; None: there are none. Raises torch.OutOfMemoryError."""
        rows, features, begin = list[int](), list[Tensor](), 0
        for item in items:
            for part in () if item.images is None else item.images.rows:
                rows += range(begin + part.at, begin + part.at + part.count)
                features.append(self._found(part.key).narrow(0, part.first, part.count))
            begin += item.q_len
        return ImageRows(upload(torch.tensor(rows), self._device), torch.cat(features)) if rows else None

    def _found(self, key: bytes) -> Tensor:
        features = self._features.get(key)
        if features is None:
            raise torch.OutOfMemoryError("an earlier step found no memory to encode an image")
        return features

    def _pixels(self, image: ImageInput) -> Pixels:
        values = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        return Pixels(upload(values.view(*image.size, CHANNELS), self._device), image.grid)
