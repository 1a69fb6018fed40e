"""Image preprocessing configuration.

transformers' fields in preprocessor_config.json, video_preprocessor_config.json or
processor_config.json; the family has defaults.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.model_files.fields import Fields, read_fields

IMAGE, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
TOGETHER = "processor_config.json"  # transformers 5 may write both here
RESAMPLINGS = 6  # of PIL: 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic, 4 box, 5 hamming

Channels = tuple[float, float, float]  # red, green, blue

CLIP_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Channels = (0.26862954, 0.26130258, 0.27577711)
HALF: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Sides are multiples of patch * merge, area is in `least`..`most` (Qwen2-VL).

    `over_frames`: the limits count all frames of a video.
    """

    least: int
    most: int
    over_frames: bool = False


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Scale the shorter side to `shortest_edge`, then crop to `height` x `width`; 0: no crop."""

    shortest_edge: int
    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessing:
    """Channel values become (value * `rescale` - `mean`) / `std`. `resample`: PIL's number.

    `video`: size of frames, if supported.
    """

    size: PixelRange | CenterCrop
    video: PixelRange | None = None
    mean: Channels
    std: Channels
    rescale: float = 1 / 255
    resample: int = 3


def read_processing(folder: Path, default: ImageProcessing, *, sizes: dict[str, int]) -> ImageProcessing:
    """Read `folder` with the family's `default`. Raises ConfigError.

    `sizes`: fields that must agree with the tower.
    """
    image, video = _object(folder, IMAGE, "image_processor"), _object(folder, VIDEO, "video_processor")
    for name, size in sizes.items():
        if image.get(name) is not None and image.count(name) != size:
            raise image.error(name, f"{image.get(name)}, but config.json has {size}; check that both belong together")
    if not image.flag("do_resize", default=True):
        raise image.error("do_resize", "false is not supported; images have any size")
    normalizes = image.flag("do_normalize", default=True)
    return ImageProcessing(
        size=_size(image, default.size),
        video=None if default.video is None else _pixel_range(video if video.names() else image, default.video),
        mean=_channels(image, "image_mean", default.mean, above=-256) if normalizes else (0.0, 0.0, 0.0),
        std=_channels(image, "image_std", default.std, above=0) if normalizes else (1.0, 1.0, 1.0),
        rescale=_rescale(image, default.rescale),
        resample=_resample(image, default.resample),
    )


def _object(folder: Path, file: str, name: str) -> Fields:
    own = read_fields(folder / file, required=False)
    return own if own.names() else read_fields(folder / TOGETHER, required=False).inside(name)


def _size(fields: Fields, default: PixelRange | CenterCrop) -> PixelRange | CenterCrop:
    return _pixel_range(fields, default) if isinstance(default, PixelRange) else _crop(fields, default)


def _pixel_range(fields: Fields, default: PixelRange) -> PixelRange:
    size = fields.inside("size")
    least = size.count("min_pixels", default=size.count("shortest_edge", default=default.least))
    most = size.count("max_pixels", default=size.count("longest_edge", default=default.most))
    found = replace(
        default, least=fields.count("min_pixels", default=least), most=fields.count("max_pixels", default=most)
    )
    if found.least > found.most:
        raise fields.error("size", f"at least {found.least} and at most {found.most} pixels; no image has both")
    return found


def _crop(fields: Fields, default: CenterCrop) -> CenterCrop:
    size = _sides(fields, "size")
    if not fields.flag("do_center_crop", default=True):
        if size.get("height") is None:
            raise fields.error(
                "do_center_crop", "false needs height and width in size: the tower takes images of one size"
            )
        return _of_tower(fields, "size", CenterCrop(0, size.count("height"), size.count("width")), default)
    if size.get("shortest_edge") is None and size.get("height") is not None:
        raise fields.error("size", "height and width before a crop are not supported; give shortest_edge")
    crop = _sides(fields, "crop_size")
    both = crop.count("shortest_edge", default=default.height)
    found = CenterCrop(
        size.count("shortest_edge", default=default.shortest_edge),
        crop.count("height", default=both),
        crop.count("width", default=both),
    )
    if found.shortest_edge < max(found.height, found.width):
        raise fields.error("crop_size", f"{found.height} x {found.width} of an edge of {found.shortest_edge} pixels")
    return _of_tower(fields, "crop_size", found, default)


def _of_tower(fields: Fields, name: str, found: CenterCrop, tower: CenterCrop) -> CenterCrop:
    if (found.height, found.width) != (tower.height, tower.width):
        raise fields.error(
            name,
            f"{found.height} x {found.width} pixels, but the tower in config.json takes {tower.height} x {tower.width}",
        )
    return found


def _sides(fields: Fields, name: str) -> Fields:
    if isinstance(fields.get(name), int):  # in old files
        return fields.with_values(**{name: {"shortest_edge": fields.get(name)}}).inside(name)
    return fields.inside(name)


def _channels(fields: Fields, name: str, default: Channels, *, above: float) -> Channels:
    values = fields.get(name, default)
    values = default if values is None else values
    numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) and above < v < 256 for v in values)
    if not numbers or len(values) != 3:
        raise fields.error(name, f"must be a list of 3 numbers above {above:g}, of red, green and blue, got {values!r}")
    red, green, blue = map(float, values)
    return red, green, blue


def _rescale(fields: Fields, default: float) -> float:
    if not fields.flag("do_rescale", default=True):
        return 1.0
    factor = fields.number("rescale_factor", default=default)
    if factor <= 0:
        raise fields.error("rescale_factor", f"must be above 0, got {factor:g}")
    return factor


def _resample(fields: Fields, default: int) -> int:
    value = fields.get("resample", default)
    if not isinstance(value, int) or not 0 <= value < RESAMPLINGS:
        raise fields.error("resample", f"must be PIL's number of a filter, 0 to {RESAMPLINGS - 1}, got {value!r}")
    return value
