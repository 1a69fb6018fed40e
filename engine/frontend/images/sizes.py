"""Image sizes, as in transformers' processors. Pure."""

import math

from engine.model_files.image_processing import CenterCrop, PixelRange
from service.images.bad_image import BadImage

MOST_RATIO = 200  # longer to shorter side (Qwen2-VL)

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
        return max(factor, math.floor(height / beta / factor) * factor), max(
            factor, math.floor(width / beta / factor) * factor
        )
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
    if max(height, width) / min(height, width) > MOST_RATIO:
        raise BadImage(f"has {width} x {height} pixels; one side may be {MOST_RATIO} times the other; cut it")
