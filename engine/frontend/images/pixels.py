"""Image files to scheduler messages: resized pixels and token counts."""

import contextlib
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from engine.frontend.images.placeholders import LoadedMedia
from engine.images import ImageInput
from engine.model_files.tower_config import CenterCrop, PixelRange
from engine.model_files.vision_config import VisionConfig
from service.images.bodies import BadImage

# ---- Image sizes, as in transformers' processors. Pure.

MAX_RATIO = 200  # longer to shorter side (Qwen2-VL)

Size = tuple[int, int]  # height, width


def range_size(range_: PixelRange, size: Size, *, factor: int) -> Size:
    """Round to multiples of `factor` in the range (`smart_resize` of Qwen2-VL). Raises BadImage."""
    height, width = size
    _check_ratio(height, width)
    return _within(range_, (height, width), factor=factor, frames=1, counted=1)


def video_size(range_: PixelRange, size: Size, *, factor: int, frames: int, temporal_patch: int) -> Size:
    """Frames' pixels may count together (Qwen3-VL). Raises BadImage."""
    if not range_.over_frames:
        return range_size(range_, size, factor=factor)
    height, width = size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(height, width)
    frames = max(frames, temporal_patch)
    counted = round(frames / temporal_patch) * temporal_patch
    return _within(range_, (height, width), factor=factor, frames=frames, counted=counted)


def _within(range_: PixelRange, size: Size, *, factor: int, frames: int, counted: int) -> Size:
    """`counted`: frames to compare with the range; `frames`: frames to compute the scale."""
    height, width = size
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if counted * tall * wide > range_.most:
        beta = math.sqrt(frames * height * width / range_.most)
        tall, wide = math.floor(height / beta / factor) * factor, math.floor(width / beta / factor) * factor
        return max(factor, tall), max(factor, wide)
    if counted * tall * wide < range_.least:
        beta = math.sqrt(range_.least / (frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return tall, wide


def edge_size(crop: CenterCrop, size: Size) -> Size:
    height, width = size
    if not crop.shortest_edge:
        return crop.height, crop.width
    longer = int(crop.shortest_edge * max(size) / min(size))
    return (longer, crop.shortest_edge) if width <= height else (crop.shortest_edge, longer)


def crop_box(crop: CenterCrop, size: Size) -> tuple[int, int, int, int]:
    height, width = size
    top, left = (height - crop.height) // 2, (width - crop.width) // 2
    return left, top, left + crop.width, top + crop.height


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise BadImage(f"has {width} x {height} pixels; one side may be {MAX_RATIO} times the other; cut it")


# ---- Decodes images with Pillow, after a check of the size in the header (decompression bombs).

PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, GifImagePlugin, BmpImagePlugin)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # no other plugin is imported
WHITE = (255, 255, 255, 255)


def size_of(data: bytes, *, max_pixels: int) -> Size:
    """(height, width) before EXIF rotation. Raises BadImage."""
    with _open(data, max_pixels=max_pixels) as image:
        return image.height, image.width


def decode(data: bytes, *, max_pixels: int) -> Image.Image:
    """Upright RGB on white, of an animation the first frame. Raises BadImage."""
    with _open(data, max_pixels=max_pixels) as image:
        try:
            image.load()
            with contextlib.suppress(Exception):  # ignore unreadable EXIF
                ImageOps.exif_transpose(image, in_place=True)
            return _on_white(image)
        except Exception as error:  # Pillow raises anything for a broken file
            raise BadImage(f"cannot be decoded as {image.format} ({_one_line(error)}); is it whole?") from None


def _on_white(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")


def _open(data: bytes, *, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(max_pixels) from None
    except Exception as error:  # as above
        known = ", ".join(FORMATS)
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({_one_line(error)})"
        raise BadImage(f"is no image that can be read{why}; send {known}") from None
    if image.width * image.height > max_pixels:
        image.close()
        raise _too_large(max_pixels)
    return image


def _too_large(max_pixels: int) -> BadImage:
    return BadImage(f"has more than {max_pixels} pixels; send a smaller one")


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


# ---- pixels

MAX_PIXELS = 1 << 25  # of a file, by its header; decoding takes four bytes each


@dataclass(frozen=True)
class PixelMaker:
    """Thread-safe. `max_pixels`: of a file."""

    vision: VisionConfig
    max_pixels: int = MAX_PIXELS
    settings: bytes = field(init=False)

    def __post_init__(self) -> None:
        tower = self.vision.tower
        settings = f"{self.vision.processing!r} {tower.patch} {tower.merge} {tower.temporal_patch}"
        object.__setattr__(self, "settings", settings.encode())

    @property
    def factor(self) -> int:
        """Side of a token in pixels."""
        return self.vision.tower.patch * self.vision.tower.merge

    def image_key(self, data: bytes) -> bytes:
        return self._key(b"image", [data])

    def video_key(self, frames: Sequence[bytes], fps: float) -> bytes:
        return self._key(b"video %r" % fps, frames)

    def count_image(self, data: bytes) -> int:
        """Tokens of an image by its header. Raises BadImage."""
        return self.vision.num_tokens(self._grid(self._target(size_of(data, max_pixels=self.max_pixels)), frames=1))

    def count_video(self, frames: Sequence[bytes]) -> int:
        """Tokens of a video by its first frame. Raises BadImage."""
        target = self._video_target(size_of(frames[0], max_pixels=self.max_pixels), len(frames))
        return self.vision.num_tokens(self._grid(target, frames=len(frames)))

    def image(self, data: bytes, key: bytes) -> LoadedMedia:
        """Raises BadImage."""
        picture = decode(data, max_pixels=self.max_pixels)
        target = self._target((picture.height, picture.width))
        size = self.vision.processing.size
        picture = self._resized(picture, edge_size(size, _size(picture)) if isinstance(size, CenterCrop) else target)
        if isinstance(size, CenterCrop):
            picture = picture.crop(crop_box(size, _size(picture)))
        return LoadedMedia((self._input(key, [picture.tobytes()], _size(picture)),))

    def video(self, frames: Sequence[bytes], fps: float, key: bytes) -> LoadedMedia:
        """Raises BadImage."""
        step = self._time_step(fps)
        target, pictures = None, []
        for index, data in enumerate(frames):
            picture = decode(data, max_pixels=self.max_pixels)
            if target is None:
                size, target = _size(picture), self._video_target(_size(picture), len(frames))
            elif size != _size(picture):
                raise BadImage(f"frame {index} has another size than frame 0; send frames of one size")
            pictures.append(self._resized(picture, target).tobytes())
        assert target is not None
        if self.vision.tokens_per_second:
            return LoadedMedia((self._input(key, pictures, target, time_step=step),), is_video=True)
        return self._timed_video(key, pictures, target, fps)

    def _timed_video(self, key: bytes, pictures: list[bytes], target: Size, fps: float) -> LoadedMedia:
        """One part per temporal patch, timed halfway between its first and last frame, as in HF."""
        each, last = self.vision.tower.temporal_patch, len(pictures) - 1
        starts = range(0, len(pictures), each)
        parts = [
            self._input(hashlib.sha256(b"%b %d" % (key, start)).digest(), pictures[start : start + each], target)
            for start in starts
        ]
        times_s = [(start / fps + min(start + each - 1, last) / fps) / 2 for start in starts]
        return LoadedMedia(tuple(parts), is_video=True, times_s=tuple(times_s))

    def _time_step(self, fps: float) -> int:
        if not self.vision.tokens_per_second:
            return 1
        per_frame = self.vision.tokens_per_second * self.vision.tower.temporal_patch
        step = per_frame / fps
        if step < 1 or step != int(step):
            raise BadImage(f"has {fps:g} frames a second; with this model it must divide {per_frame:g}")
        return int(step)

    def _input(self, key: bytes, pictures: list[bytes], size: Size, *, time_step: int = 1) -> ImageInput:
        grid = self._grid(size, frames=len(pictures))
        num_tokens = self.vision.num_tokens(grid)
        return ImageInput(
            start=0,
            num_tokens=num_tokens,
            key=key,
            grid=grid if self.vision.mrope is not None else (num_tokens, 1, 1),  # one position per token
            merge=self.vision.tower.merge,
            size=(len(pictures), *size),
            pixels=b"".join(pictures),
            time_step=time_step,
        )

    def _target(self, size: Size) -> Size:
        wanted = self.vision.processing.size
        if isinstance(wanted, CenterCrop):
            return wanted.height, wanted.width
        return range_size(wanted, size, factor=self.factor)

    def _video_target(self, size: Size, frames: int) -> Size:
        range_ = self.vision.processing.video
        assert isinstance(range_, PixelRange), "a model that takes no videos gets none"
        temporal = self.vision.tower.temporal_patch
        return video_size(range_, size, factor=self.factor, frames=frames, temporal_patch=temporal)

    def _grid(self, size: Size, *, frames: int) -> tuple[int, int, int]:
        tower = self.vision.tower
        return -(-frames // tower.temporal_patch), size[0] // tower.patch, size[1] // tower.patch

    def _resized(self, picture: Image.Image, size: Size) -> Image.Image:
        height, width = size
        return picture.resize((width, height), resample=Image.Resampling(self.vision.processing.resample))

    def _key(self, kind: bytes, files: Sequence[bytes]) -> bytes:
        digest = hashlib.sha256(b"%b\0%b" % (kind, self.settings))
        for data in files:
            digest.update(b"\0%d\0" % len(data))
            digest.update(data)
        return digest.digest()


def _size(picture: Image.Image) -> Size:
    return picture.height, picture.width
