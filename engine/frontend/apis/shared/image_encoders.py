"""Encoder workers of a prompt's images, from the router."""

from collections.abc import Sequence

import msgspec

from engine.frontend.services import SERVICES
from engine.messages import FeatureSource, GenerateRequest
from service.http.image_encoders import ENCODERS_HEADER, read_header
from service.http.request import HttpRequest


def with_image_encoders(request: HttpRequest, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Add encoders to `requests`.

    Unsigned headers and disallowed workers are ignored: this worker encodes. If the router
    counts fewer images, the last ones use the last encoder.
    """
    value, spec = request.headers.get(ENCODERS_HEADER), request[SERVICES].spec
    if value is None or spec.mode == "decode":
        return requests
    named = read_header(value, spec.secret)
    if not named:
        return requests
    allowed = [one if one is not None and spec.bootstrap_allowlist.admits(one.control) else None for one in named]
    sources = [None if one is None else FeatureSource(one.control, one.incarnation) for one in allowed]
    last = len(sources) - 1
    return [
        msgspec.structs.replace(r, encoders=[sources[min(first + i, last)] for i in range(len(r.images))])
        for r, first in zip(requests, _num_earlier(requests), strict=True)
    ]


def _num_earlier(requests: Sequence[GenerateRequest]) -> list[int]:
    """Images of earlier prompts, per request. Samples of a prompt share its list."""
    counts, earlier = list[int](), 0
    for before, request in zip((None, *requests), requests, strict=False):
        if before is not None and request.images is not before.images:
            earlier += len(before.images)
        counts.append(earlier)
    return counts
