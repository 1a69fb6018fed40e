"""Samples of one HTTP request as one message. Pure, never torch."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.images import ImageInput
from engine.messages import GenerateBatch, GenerateRequest


def batch_of(requests: Sequence[GenerateRequest]) -> GenerateBatch:
    """Keep each image's pixels only at its first use, by key."""
    sent = set[bytes]()
    return GenerateBatch([_without(r, sent) if r.images else r for r in requests])


def requests_of(batch: GenerateBatch) -> list[GenerateRequest]:
    """Restore the requests; images encoded elsewhere have no pixels."""
    pixels = {image.key: image.pixels for r in batch.requests for image in r.images if image.pixels}
    return [_with(r, pixels) if r.images else r for r in batch.requests]


def _without(request: GenerateRequest, sent: set[bytes]) -> GenerateRequest:
    images = list[ImageInput]()
    for image in request.images:
        images.append(replace(image, pixels=b"") if image.key in sent else image)
        if image.pixels:
            sent.add(image.key)
    return replace(request, images=images)


def _with(request: GenerateRequest, pixels: dict[bytes, bytes]) -> GenerateRequest:
    return replace(request, images=[replace(one, pixels=pixels.get(one.key, b"")) for one in request.images])
