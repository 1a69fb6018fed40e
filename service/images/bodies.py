"""Images and videos in bodies of OpenAI, Anthropic, Ollama and SGLang. Pure."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_PARTS = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
}  # type of a part -> its field
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
