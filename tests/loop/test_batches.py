"""Samples of one request share the pixels of their images on the wire, and are whole behind it."""

import msgspec
from msgspec.structs import replace

from engine.images import ImageInput
from engine.messages import GenerateBatch, GenerateRequest, batch_of, requests_of
from engine.sampling_params import SamplingParams
from tests.core.mem_cache.images import image, prompt_of


def sample(rid: str, *images: ImageInput) -> GenerateRequest:
    return GenerateRequest(rid, prompt_of(*images), SamplingParams(), images=list(images))


def wired(requests: list[GenerateRequest]) -> tuple[int, list[GenerateRequest]]:
    """Bytes on the wire, and what comes of them."""
    sent = msgspec.msgpack.encode(batch_of(requests))
    return len(sent), requests_of(msgspec.msgpack.decode(sent, type=GenerateBatch))


def test_pixels_cross_once_however_many_samples_there_are() -> None:
    shown = [image(1, at=3, rows=20, columns=20), image(2, at=500)]
    alone, _ = wired([sample("0", *shown)])
    together, found = wired([sample(str(i), *shown) for i in range(8)])
    assert found == [sample(str(i), *shown) for i in range(8)]
    assert together - alone < len(shown[0].pixels) < alone, "no second copy"
    assert len({id(request.images[0].pixels) for request in found}) == 1, "nor in memory"


def test_an_image_that_a_prompt_shows_twice_crosses_once() -> None:
    twice = sample("0", image(1, at=3), image(1, at=13))
    (sent,) = batch_of([twice]).requests
    assert [bool(one.pixels) for one in sent.images] == [True, False]
    assert wired([twice, sample("text")])[1] == [twice, sample("text")]


def test_images_whose_features_come_from_elsewhere_stay_without_pixels() -> None:
    bare = [sample(str(i), replace(image(1, at=3), pixels=b"")) for i in range(2)]
    assert wired(bare)[1] == bare
