"""The signed header of a router with the encoder workers of a prompt's images.

    X-Tandem-Image-Encoders: SIGNATURE {"encoders": [{"control": "host:port", "incarnation": ...}],
                                        "images": [0, null, 0]}

`images`: an index or null per image, in order, to stay below servers' bounds.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from service.http.errors import decode_or_none
from service.security.keys import is_signed, sign

ENCODERS_HEADER = "X-Tandem-Image-Encoders"
PURPOSE = "image encoders"
MAX_ENCODERS = 16  # per request, as headers are bounded by 8 KiB
MAX_IMAGES = 1024  # so many indices and 16 encoders fit


class ImageEncoder(msgspec.Struct, frozen=True):
    """A worker's control plane and incarnation."""

    control: Annotated[str, msgspec.Meta(max_length=300)]
    incarnation: Annotated[str, msgspec.Meta(max_length=300)]


class _Named(msgspec.Struct, frozen=True):
    encoders: Annotated[list[ImageEncoder], msgspec.Meta(max_length=MAX_ENCODERS)]
    images: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_ENCODERS)] | None], msgspec.Meta(max_length=MAX_IMAGES)
    ]


def write_header(encoders: Sequence[ImageEncoder | None], secret: bytes) -> str:
    """Write each image's encoder, None for the worker itself, within bounds."""
    asked = encoders[:MAX_IMAGES]
    distinct = list(dict.fromkeys(encoder for encoder in asked if encoder is not None))[:MAX_ENCODERS]
    places: dict[ImageEncoder | None, int] = {encoder: place for place, encoder in enumerate(distinct)}
    text = msgspec.json.encode(_Named(distinct, [places.get(encoder) for encoder in asked]))
    return f"{sign(text, secret, purpose=PURPOSE)} {text.decode()}"


def read_header(value: str, secret: bytes | None) -> list[ImageEncoder | None] | None:
    """None for a header not from our router."""
    signature, _, text = value.partition(" ")
    raw = text.encode(errors="replace")
    if not is_signed(signature, raw, secret, purpose=PURPOSE):
        return None
    named: _Named | None = decode_or_none(raw, _Named)
    if named is None or any(place is not None and place >= len(named.encoders) for place in named.images):
        return None
    return [None if place is None else named.encoders[place] for place in named.images]
