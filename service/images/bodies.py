"""Images and videos in bodies of OpenAI, Anthropic, Ollama and SGLang. Pure."""

import binascii
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from service.http.errors import ApiError, bad_field

# Type of a part -> its field.
_PARTS = {"image_url": "image_url", "input_image": "image_url", "video_url": "video_url"}
_OF_VIDEOS = ("video_url", "video_data")
_INSIDE = ("content", "output")  # fields that hold parts


class NamedImage(NamedTuple):
    """An image or video at the path `field`; `put` replaces it."""

    field: str
    url: str
    put: Callable[[str], None]
    is_video: bool = False


def images_in(value: Any, path: str) -> Iterator[NamedImage]:
    """Yield images and videos of messages, items or blocks."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from images_in(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        yield from _part(value, path)
        yield from urls_in(value, "images", f"{path}.images")
        for name in _INSIDE:
            if isinstance(value.get(name), list):
                yield from images_in(value[name], f"{path}.{name}")


def urls_in(holder: dict[str, Any], name: str, path: str) -> Iterator[NamedImage]:
    """Yield a field's images: a URL, or nested lists."""
    return _urls(holder, name, path) if name in holder else iter(())


def _urls(holder: Any, key: str | int, path: str, *, is_video: bool = False) -> Iterator[NamedImage]:
    value, is_video = holder[key], is_video or key in _OF_VIDEOS
    if isinstance(value, str):
        yield NamedImage(path, value, _put(holder, key), is_video)
    for index in range(len(value)) if isinstance(value, list) else ():
        yield from _urls(value, index, f"{path}[{index}]", is_video=is_video)


def _part(part: dict[str, Any], path: str) -> Iterator[NamedImage]:
    kind, source = part.get("type"), part.get("source")
    if isinstance(kind, str) and (name := _PARTS.get(kind)):
        yield from _url_of(part, name, f"{path}.{name}", is_video=name in _OF_VIDEOS)
    elif kind == "image" and isinstance(source, dict):
        yield from _url_of(source, "url" if source.get("type") == "url" else "data", f"{path}.source")


def _url_of(part: dict[str, Any], name: str, path: str, *, is_video: bool = False) -> Iterator[NamedImage]:
    value = part.get(name)
    if isinstance(value, str):
        yield NamedImage(path, value, _put(part, name), is_video)
    elif isinstance(value, dict):
        yield from _url_of(value, "url", path, is_video=is_video)


def _put(holder: Any, key: str | int) -> Callable[[str], None]:
    def put(url: str) -> None:
        holder[key] = url

    return put


# ---- Errors of image sources. The API adds the field (`with_field`).


class BadImage(ValueError):
    """The text continues "FIELD: "."""


def with_field(error: BadImage, field: str) -> ApiError:
    return bad_field(field, str(error))


# ---- Images inside requests: data URLs (RFC 2397) and base64. Pure.

MOST_SHOWN = 40  # characters quoted in an error
VIDEO_FRAMES = "video/jpeg"  # a video as comma-separated base64 frames, as in vLLM

_ALPHABET = str.maketrans("-_", "+/", " \t\r\n")  # URL-safe base64, and line breaks
_MAGIC = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG": "image/png",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}


def is_data_url(source: str) -> bool:
    return source[:5].lower() == "data:"


def data_of(url: str) -> bytes:
    head, text = _split(url)
    if head.lower().endswith(";base64"):
        return from_base64(text)
    return unquote_to_bytes(text)


def data_url(data: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{binascii.b2a_base64(data, newline=False).decode()}"


def frames_of(url: str) -> list[bytes]:
    head, text = _split(url) if is_data_url(url) else ("", "")
    if head.lower() != f"{VIDEO_FRAMES};base64":
        raise BadImage(
            f"a video must come as its frames, data:{VIDEO_FRAMES};base64,FRAME,FRAME...; got {url[:MOST_SHOWN]!r}; take frames out of the file"
        )
    return [from_base64(frame) for frame in text.split(",")]


def from_base64(text: str) -> bytes:
    plain = text.translate(_ALPHABET) if re.search(r"[-_\s]", text) else text
    plain = plain.rstrip("=")
    try:
        data = binascii.a2b_base64(plain + "=" * (-len(plain) % 4), strict_mode=True)
    except ValueError as error:  # not base64, or not ASCII
        raise BadImage(f"is not base64 ({str(error)[:80]})") from None
    if not data:
        raise BadImage("is empty; send an image")
    return data


def _split(url: str) -> tuple[str, str]:
    head, comma, text = url[5:].partition(",")
    if not comma:
        raise BadImage(f"is a data URL without a comma before its data: {url[:MOST_SHOWN]!r}")
    return head, text
