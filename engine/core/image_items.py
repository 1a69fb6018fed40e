"""Image data of plan items: feature rows instead of embeddings, and RoPE positions."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.core.plan import FeatureRows, ItemImages, PlanItem
from engine.core.request import Request
from engine.images import ImageInput, rope_positions


def with_images(item: PlanItem, request: Request) -> PlanItem:
    images, end = request.images, item.kv_len
    if item.start >= images[-1].end:
        return replace(item, images=ItemImages(rope_delta=request.rope_delta)) if request.rope_delta else item
    begun = [image for image in images if image.start < end]
    if not begun:
        return item
    rope = rope_positions(images, item.start, end) if any(map(_turns, begun)) else None
    return replace(item, images=ItemImages(_rows_of(begun, item.start, end), rope))


def _turns(image: ImageInput) -> bool:
    _, rows, columns = image.grid
    return rows * columns > 1


def _rows_of(images: Sequence[ImageInput], start: int, end: int) -> tuple[FeatureRows, ...]:
    found = list[FeatureRows]()
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            found.append(FeatureRows(first - start, image.key, first - image.start, last - first))
    return tuple(found)
