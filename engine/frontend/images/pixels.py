"""Image files to scheduler messages: resized pixels and token counts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from engine.frontend.images.decode import decode, size_of
from engine.frontend.images.loaded import LoadedMedia
from engine.frontend.images.sizes import Size, crop_box, edge_size, range_size, video_size
from engine.images import ImageInput
from engine.model_files.image_processing import CenterCrop, PixelRange
from engine.model_files.vision_config import VisionConfig
from service.images.bad_image import BadImage

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
