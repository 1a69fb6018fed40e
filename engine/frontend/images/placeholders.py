"""Images and videos of a prompt: their sources, and placeholders expanded to token counts. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from engine.images import ImageInput
from engine.model_files.vision_config import VisionConfig
from service.http.errors import bad_field
from service.images.bodies import MOST_SHOWN, is_data_url

# ---- Images and videos of a prompt, as named and as loaded.


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """An image or video URL; `field`: its part of the request.

    `is_base64`: base64 if without a scheme. `fps`: frames per second.
    """

    field: str
    url: str
    is_video: bool = False
    is_base64: bool = False
    fps: float | None = None

    @property
    def is_remote(self) -> bool:
        is_here = is_data_url(self.url) or (self.is_base64 and "://" not in self.url[:MOST_SHOWN])
        return not self.is_video and not is_here


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """`parts` have one placeholder each and no `start` yet. `times_s`: timestamps for the prompt's
    text, if needed.
    """

    parts: tuple[ImageInput, ...]
    is_video: bool = False
    times_s: tuple[float, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(len(part.pixels) for part in self.parts)


# ---- Placeholder and marker tokens of a multimodal model, as text.


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts of `VisionConfig`'s tokens, empty if absent or without tokenizer."""

    image: str = ""
    video: str = ""
    start: str = ""
    end: str = ""


NO_MARKS = Marks()


# ---- placeholders


def with_times(text: str, loaded: Sequence[LoadedMedia], marks: Marks) -> str:
    """Write video timestamps: "<0.3 seconds>" and a placeholder per temporal patch.

    They replace the template's start, placeholder and end, as in Qwen3-VL's first processor
    (transformers 4.57); transformers 5 keeps start and end around them.
    """
    pieces, rest = [], text
    whole = marks.start + marks.video + marks.end
    for video in loaded:
        if not video.times_s:
            continue
        before, found, rest = rest.partition(whole if whole in rest else marks.video)
        written = "".join(f"<{time_s:.1f} seconds>{whole}" for time_s in video.times_s)
        pieces += [before, written if found else ""]
    return "".join([*pieces, rest])


def expanded(
    ids: list[int], loaded: Sequence[LoadedMedia], vision: VisionConfig, *, marks: Marks, field: str
) -> tuple[list[int], list[ImageInput]]:
    """Expand placeholders; return the prompt, and the images with `start`.

    Raises ApiError(400) that names `field` if numbers differ.
    """
    images = [part for one in loaded if not one.is_video for part in one.parts]
    videos = [part for one in loaded if one.is_video for part in one.parts]
    _check(ids.count(vision.image_token_id), len(images), "images", marks.image, vision.image_token_id, field)
    if vision.video_token_id is not None:
        _check(ids.count(vision.video_token_id), len(videos), "videos", marks.video, vision.video_token_id, field)
    waiting: dict[int | None, Iterator[ImageInput]] = {
        vision.video_token_id: iter(videos),
        vision.image_token_id: iter(images),
    }
    found: list[int] = []
    placed: list[ImageInput] = []
    for token in ids:
        if token in waiting:
            part = next(waiting[token])
            placed.append(msgspec.structs.replace(part, start=len(found)))
            found += [token] * part.num_tokens
        else:
            found.append(token)
    return found, placed


def _check(places: int, count: int, what: str, mark: str, token_id: int, field: str) -> None:
    if places != count:
        name = f"{mark} (token {token_id})" if mark else f"token {token_id}"
        raise bad_field(
            field,
            f"the prompt has {places} placeholders for {what}, and needs {count}: write one {name} for each, and none in text",
        )
