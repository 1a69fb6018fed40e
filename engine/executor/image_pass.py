"""Image features of steps, from the vision tower or another worker, and their rows.

Features stay by key until a plan forgets them. A failed step may have encoded nothing: steps in
flight that need its features fail too, and the scheduler has later ones encode again.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from engine.core.plan import FeatureLand, Plan, PlanItem
from engine.executor.step_part import Batch, StepPart, StepRows
from engine.images import ImageInput
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import upload
from engine.model_files.tower_config import CHANNELS
from engine.models.vision.tower import ImageRows, Pixels, VisionTower
from engine.parallel.collectives import SINGLE_RANK, Collectives


class EncoderRanks:
    """Vision data parallelism: one first-stage rank encodes an image, and broadcasts features.

    Each rank has the whole tower and encodes images one by one. After SGLang's and vLLM's.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, pixels: Callable[[ImageInput], Pixels]) -> None:
        self._dtype, self._device = dtype, device
        self._pixels = pixels

    def encode(self, tower: VisionTower, images: Sequence[ImageInput], ranks: Collectives) -> list[Tensor]:
        """Each image's [num_tokens, feature size] on all `ranks`.

        Raises torch.OutOfMemoryError; other ranks then wait for the group's end.
        """
        owners = deal([prod(image.grid) for image in images], ranks.size)
        mine = [image for image, owner in zip(images, owners, strict=True) if owner == ranks.rank]
        encoded = iter([tower.encode(self._pixels(image)) for image in mine])
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


class Seeing(Protocol):
    """Model part that encodes."""

    @property
    def vision(self) -> VisionTower | None: ...


@dataclass(eq=False)
class ImagePass(StepPart):
    """A rank's images in steps; calls come in stream order.

    `shares`: the `ranks` of the stage divide a step's images, else each encodes all. `arrivals`:
    where encode workers write features, on rank 0 alone.
    """

    device: torch.device
    _: KW_ONLY
    dtype: torch.dtype
    ranks: Collectives = SINGLE_RANK
    shares: bool = False
    arrivals: KVPool | None = None

    def __post_init__(self) -> None:
        dtype, device = self.dtype, self.device
        self._encoders = EncoderRanks(dtype=dtype, device=device, pixels=self._pixels) if self.shares else None
        self._features: dict[bytes, Tensor] = {}

    def forget(self) -> None:
        self._features = {}

    def prepare(self, model: Seeing, plan: Plan) -> None:
        """Forget, copy and encode what `plan` says. Raises torch.OutOfMemoryError."""
        for key in plan.forgets:
            self._features.pop(key, None)
        for land in plan.lands:
            self._features[land.key] = self._landed(model, land)
        if plan.encodes:
            encoded = self._encoded(model, plan.encodes)
            self._features.update(zip((image.key for image in plan.encodes), encoded, strict=True))

    def _landed(self, model: Seeing, land: FeatureLand) -> Tensor:
        """[num_tokens, feature size], on all ranks."""
        assert model.vision is not None, "features for a model without a tower"
        if self.arrivals is not None:
            pages = upload(land.pages, self.device)
            features = self.arrivals.read(0, pages)[0].flatten(1)[: land.num_tokens].contiguous()
        else:
            size = (land.num_tokens, model.vision.feature_size)
            features = torch.empty(size, dtype=self.dtype, device=self.device)
        self.ranks.share(features)
        return features

    def _encoded(self, model: Seeing, images: Sequence[ImageInput]) -> list[Tensor]:
        assert model.vision is not None, "images for a model without a tower"
        if self._encoders is not None:
            return self._encoders.encode(model.vision, images, self.ranks)
        return [model.vision.encode(self._pixels(image)) for image in images]

    def begin(self, batch: Batch) -> None:
        """Raises torch.OutOfMemoryError."""
        rows, features = self.rows(batch.items)
        if rows:
            batch.images = (ImageRows(upload(rows, self.device), torch.cat(features)),)

    def rows(self, items: Sequence[PlanItem]) -> tuple[list[int], list[Tensor]]:
        """The image rows of a step and their features. Raises torch.OutOfMemoryError."""
        rows, features, begin = list[int](), list[Tensor](), 0
        for item in items:
            for part in () if item.images is None else item.images.rows:
                rows += range(begin + part.at, begin + part.at + part.count)
                features.append(self._found(part.key).narrow(0, part.first, part.count))
            begin += item.q_len
        return rows, features

    def _found(self, key: bytes) -> Tensor:
        features = self._features.get(key)
        if features is None:
            raise torch.OutOfMemoryError("an earlier step found no memory to encode an image")
        return features

    def _pixels(self, image: ImageInput) -> Pixels:
        values = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        return Pixels(upload(values.view(*image.size, CHANNELS), self.device), image.grid)


class ImagePositions(StepPart):
    """RoPE positions that images move: of all stages. Only the first has an ImagePass."""

    def fill(self, rows: StepRows) -> None:
        rows.positions = rope_positions(rows.items, rows.positions)


def rope_positions(items: Sequence[PlanItem], places: Tensor) -> Tensor:
    """The RoPE positions of tokens, which images may move.

    int64 [T], or [3, T] (time, row, column) with image tokens. `places`: [T], in requests.
    """
    if all(item.images is None for item in items):
        return places
    ropes = [None if item.images is None else item.images.rope for item in items]
    if not any(ropes):
        return upload([position for item in items for position in _one_by_one(item)], places.device)
    rows: tuple[list[int], list[int], list[int]] = ([], [], [])
    for item, rope in zip(items, ropes, strict=True):
        for row, own in zip(rows, rope or [_one_by_one(item)] * 3, strict=True):
            row += own
    return upload(rows, places.device)


def _one_by_one(item: PlanItem) -> range:
    delta = 0 if item.images is None else item.images.rope_delta
    return range(item.start + delta, item.kv_len + delta)
