"""Images in bodies, fetched once for all workers of a request.

Without images a chat costs a substring search. Routing reads a digest per image. Videos come as
frames.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from router.attempts.request import CallPart, RequestContext
from router.body import HISTORY_FIELD, TOKENS_PER_IMAGE, Api, ParsedBody, with_fields, write_body
from service.http.errors import bad_field, decode_or_none
from service.images.bodies import BadImage, NamedImage, data_url, images_in, is_data_url, urls_in, with_field
from service.images.fetch import ImageFetcher
from service.images.hosts import ImageFlags
from service.waiter import BODIES

_FIELDS = {
    Api.CHAT: ("messages",),
    Api.MESSAGES: ("messages",),
    Api.RESPONSES: (HISTORY_FIELD, "input"),
    Api.GENERATE: ("image_data", "video_data"),
    Api.OLLAMA_CHAT: ("messages",),
    Api.OLLAMA_GENERATE: ("images",),
}
_LISTS = ("image_data", "video_data", "images")  # fields that hold only these

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class WithImages:
    """`body` for workers; `shown`, with digests and estimated tokens, for routing."""

    body: ParsedBody
    shown: ParsedBody
    digests: tuple[str, ...] = ()
    fetched: bool = False


class BodyImages:
    """A `BodyPart`. `most_bytes` bounds the result."""

    apis = tuple(_FIELDS)
    needles = (b'"image', b'"video')  # prefixes of their field names

    def __init__(self, flags: ImageFlags, *, part_of: Callable[[Sequence[str]], CallPart], most_bytes: int) -> None:
        self._flags = flags
        self._part_of = part_of
        self._most_bytes = most_bytes
        self._fetcher = ImageFetcher(flags)

    async def prepare(self, request: RequestContext) -> ParsedBody:
        taken = await self.take(request.parsed)
        if taken.fetched:
            request.body = write_body(taken.body)
        request.parsed = taken.body
        if taken.digests:
            request.parts = (*request.parts, self._part_of(taken.digests))
        return taken.shown

    async def take(self, parsed: ParsedBody) -> WithImages:
        """ApiError(400) names the field."""
        names = [name for name in _FIELDS.get(parsed.api, ()) if name in parsed.fields]
        size = sum(len(parsed.fields[name]) for name in names)
        values, images = await BODIES.run(partial(_found, parsed, names), size=size)
        if not images:
            return WithImages(parsed, parsed)
        others = [image for image in images if not image.is_video and not is_data_url(image.url)]
        if remote := [image for image in others if "://" in image.url[:16]]:
            await self._fetch(remote, parsed)
        finish = partial(_with_digests, parsed, values, fetched=bool(remote))
        return await BODIES.run(finish, size=self._most_bytes if remote else size)

    async def _fetch(self, remote: list[NamedImage], parsed: ParsedBody) -> None:
        if len(remote) > self._flags.max_images_per_request:
            text = (
                f"is more than the {self._flags.max_images_per_request} images of a request (--max-images-per-request)"
            )
            raise bad_field(remote[self._flags.max_images_per_request].field, f"{text}; send fewer")
        room = (self._most_bytes - sum(map(len, parsed.fields.values()))) * 3 // 4  # base64
        fetched = await self._fetcher.fetch_all([image.url for image in remote], most_bytes=room)
        for image in remote:
            answer = fetched[image.url]
            if isinstance(answer, BadImage):
                raise with_field(answer, image.field)
            image.put(data_url(answer))


def _found(parsed: ParsedBody, names: Sequence[str]) -> tuple[dict[str, Any], list[NamedImage]]:
    values = {name: decode_or_none(parsed.fields[name]) for name in names}
    return values, list(_images(values))


def _with_digests(parsed: ParsedBody, values: dict[str, Any], *, fetched: bool) -> WithImages:
    body = with_fields(parsed, _written(values)) if fetched else parsed
    images = list(_images(values))
    digests = [_digest(image.url) for image in images]
    for image, digest in zip(images, digests, strict=True):
        image.put(digest)
    shown = with_fields(parsed, _written(values))
    num_tokens = shown.prompt_tokens + TOKENS_PER_IMAGE * len(images)
    shown = msgspec.structs.replace(shown, prompt_tokens=num_tokens)
    body = msgspec.structs.replace(body, prompt_tokens=num_tokens)
    return WithImages(body, shown, tuple(digests), fetched=fetched)


def _written(values: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: _encode(value) for name, value in values.items()}


def _images(values: dict[str, Any]) -> Iterator[NamedImage]:
    for name, value in values.items():
        yield from urls_in(values, name, name) if name in _LISTS else images_in(value, name)


def _digest(url: str) -> str:
    return "sha256:" + hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()
