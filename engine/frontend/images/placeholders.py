"""The places of images in a prompt: one token each as templates and clients write them, then as many as stand for the image. Pure."""

from collections.abc import Iterator, Sequence

import msgspec

from engine.frontend.images.loaded import LoadedMedia
from engine.frontend.images.marks import Marks
from engine.images import ImageInput
from engine.model_files.vision_config import VisionConfig
from service.http.errors import bad_field


def with_times(text: str, loaded: Sequence[LoadedMedia], marks: Marks) -> str:
    """Write the times of videos into a prompt, a place for each temporal patch (Qwen3-VL): "<0.3 seconds>" before each."""
    pieces, rest = [], text
    whole = marks.start + marks.video + marks.end
    for video in loaded:
        if not video.times_s:
            continue
        place = whole if whole in rest else marks.video
        before, found, rest = rest.partition(place)
        written = "".join(f"<{time_s:.1f} seconds>{whole}" for time_s in video.times_s)
        pieces += [before, written if found else ""]
    return "".join([*pieces, rest])


def expanded(
    ids: list[int], loaded: Sequence[LoadedMedia], vision: VisionConfig, *, marks: Marks, field: str
) -> tuple[list[int], list[ImageInput]]:
    """Return the prompt with each place as long as its image, and the images in their places. Raises ApiError(400): `field` has other places."""
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
            f"the prompt has {places} places for {what}, and {count} came with it; each needs one {name}, and text must not hold it",
        )
