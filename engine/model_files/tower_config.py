"""Vision tower configurations.

WindowTower     Qwen2.5-VL (arXiv:2502.13923): windowed attention, images of any size
LearnedTower    Qwen3-VL, Qwen3.5: interpolated learned positions, deepstack (arXiv:2406.04334)
ClipTower       LLaVA 1.5 (arXiv:2310.03744): CLIP, images of one size
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from engine.model_files.fields import Fields, read_fields

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")
CHANNELS = 3
VISION = "vision_config"
MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """`depth` layers; patches of `patch` ** 2 pixels, tokens of `merge` ** 2 patches."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch: int
    merge: int = 1
    temporal_patch: int = 1
    activation: str

    eps = 1e-6  # of the norms

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTower(TowerConfig):
    """Windows of `window` ** 2 tokens except in `full_layers`; RoPE."""

    rope_theta: float
    window: int
    full_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTower(TowerConfig):
    """Tower with `side` ** 2 learned positions. Outputs of `deepstack_layers` are features, too."""

    rope_theta: float
    side: int
    deepstack_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTower(TowerConfig):
    """`side` ** 2 patches after a class token, which stays with `keeps_class`.

    `taken`: states that the projector concatenates, 0 (before all layers) to `depth`.
    """

    side: int
    taken: tuple[int, ...]
    keeps_class: bool
    eps: float
    projector: str
    projector_bias: bool

    @property
    def num_tokens(self) -> int:
        return self.side**2 + self.keeps_class


Tower = WindowTower | LearnedTower | ClipTower


def read_windows(fields: Fields, hidden: int) -> WindowTower:
    vision = fields.inside(VISION)
    depth = vision.count("depth", default=32, most=MOST_LAYERS)
    patch, merge = vision.count("patch_size", default=14), vision.count("spatial_merge_size", default=2)
    window = vision.count("window_size", default=112)
    if window % (patch * merge):
        raise vision.error("window_size", f"{window} pixels are no multiple of {patch * merge}, the pixels of a token")
    return WindowTower(
        depth=depth,
        hidden_size=_hidden(vision, default=3584),
        intermediate_size=vision.count("intermediate_size", default=3420),
        num_heads=_heads(vision),
        patch=patch,
        merge=merge,
        temporal_patch=_temporal(vision, hidden=hidden),
        activation=_activation(vision, default="silu", known=("silu",)),
        rope_theta=vision.inside("rope_parameters").number("rope_theta", default=10000.0, above=1),
        window=window // (patch * merge),
        full_layers=_layers(vision, "fullatt_block_indexes", default=(7, 15, 23, 31), depth=depth),
    )


def read_learned(fields: Fields, hidden: int, *, deepstack: bool) -> LearnedTower:
    """`deepstack`: of Qwen3-VL, not of Qwen3.5."""
    vision = fields.inside(VISION)
    depth = vision.count("depth", default=27, most=MOST_LAYERS)
    positions = vision.count("num_position_embeddings", default=2304)
    if (side := math.isqrt(positions)) ** 2 != positions:
        raise vision.error("num_position_embeddings", f"{positions} is no square")
    levels: tuple[int, ...] = ()
    if deepstack:
        levels = _layers(vision, "deepstack_visual_indexes", default=(8, 16, 24), depth=depth)
    elif vision.get("deepstack_visual_indexes"):
        raise vision.error("deepstack_visual_indexes", "this architecture has none; must be empty")
    return LearnedTower(
        depth=depth,
        hidden_size=_hidden(vision, default=1152),
        intermediate_size=vision.count("intermediate_size", default=4304),
        num_heads=_heads(vision),
        patch=vision.count("patch_size", default=16),
        merge=vision.count("spatial_merge_size", default=2),
        temporal_patch=_temporal(vision, hidden=hidden),
        activation=_activation(vision, default="gelu_pytorch_tanh"),
        rope_theta=vision.inside("rope_parameters").number("rope_theta", default=10000.0, above=1),
        side=side,
        deepstack_layers=levels,
    )


def read_clip(fields: Fields) -> ClipTower:
    vision = fields.inside(VISION)
    if (kind := vision.text("model_type", default="clip_vision_model")) != "clip_vision_model":
        raise fields.error(VISION, f"model_type {kind} is not supported in LlavaForConditionalGeneration; CLIP's is")
    hidden, heads = vision.count("hidden_size", default=1024), vision.count("num_attention_heads", default=16)
    if hidden % heads:
        raise vision.error("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    depth = vision.count("num_hidden_layers", default=24, most=MOST_LAYERS)
    patch, image = vision.count("patch_size", default=14), vision.count("image_size", default=336)
    if vision.count("num_channels", default=CHANNELS) != CHANNELS:
        raise vision.error("num_channels", f"must be {CHANNELS}, red, green and blue")
    if (strategy := fields.text("vision_feature_select_strategy", default="default")) not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", f"{strategy} is not supported; default and full are")
    return ClipTower(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=vision.count("intermediate_size", default=4096),
        num_heads=heads,
        patch=patch,
        activation=_activation(vision, default="quick_gelu"),
        side=image // patch,
        taken=_taken(fields, depth=depth),
        keeps_class=strategy == "full",
        eps=vision.number("layer_norm_eps", default=1e-5),
        projector=_activation(fields, name="projector_hidden_act", default="gelu"),
        projector_bias=fields.flag("multimodal_projector_bias", default=True),
    )


def _hidden(vision: Fields, *, default: int) -> int:
    """Heads must be divisible for RoPE by rows and by columns."""
    hidden, heads = vision.count("hidden_size", default=default), _heads(vision)
    if hidden % heads or hidden // heads % 4:
        raise vision.error("num_heads", f"{heads} heads of hidden_size {hidden}; a head's size must be a multiple of 4")
    return hidden


def _heads(vision: Fields) -> int:
    return vision.count("num_heads", default=16)


def _temporal(vision: Fields, *, hidden: int) -> int:
    if vision.count("out_hidden_size", default=hidden) != hidden:
        raise vision.error(
            "out_hidden_size", f"{vision.get('out_hidden_size')}; must be the text model's hidden_size {hidden}"
        )
    if vision.count("in_channels", default=vision.count("in_chans", default=CHANNELS)) != CHANNELS:
        raise vision.error("in_channels", f"must be {CHANNELS}, red, green and blue")
    return vision.count("temporal_patch_size", default=2)


def _activation(fields: Fields, *, name: str = "hidden_act", default: str, known: tuple[str, ...] = ACTIVATIONS) -> str:
    value = fields.text(name, default=default)
    if value not in known:
        raise fields.error(name, f"{value} is not supported; supported: {', '.join(known)}")
    return value


def _layers(vision: Fields, name: str, *, default: tuple[int, ...], depth: int) -> tuple[int, ...]:
    layers = list(default) if vision.get(name) is None else vision.get(name)
    whole = isinstance(layers, list) and all(isinstance(layer, int) and 0 <= layer < depth for layer in layers)
    if not whole or sorted(set(layers)) != layers:
        raise vision.error(name, f"must name layers of the tower's {depth}, in order, got {layers!r}")
    return tuple(layers)


def _taken(fields: Fields, *, depth: int) -> tuple[int, ...]:
    """States of vision_feature_layer: 0 is before all layers; negative counts from the last."""
    named = fields.get("vision_feature_layer", -2)
    layers = named if isinstance(named, list) else [named]
    found = [layer + depth + 1 if isinstance(layer, int) and layer < 0 else layer for layer in layers]
    if not found or not all(isinstance(layer, int) and 0 <= layer <= depth for layer in found):
        raise fields.error("vision_feature_layer", f"must name states of the tower's {depth} layers, got {named!r}")
    return tuple(found)


# ---- image preprocessing

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

    transformers' fields in preprocessor_config.json, video_preprocessor_config.json or
    processor_config.json; the family has defaults.
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
    normalizes, rescales = image.flag("do_normalize", default=True), image.flag("do_rescale", default=True)
    return ImageProcessing(
        size=_size(image, default.size),
        video=None if default.video is None else _pixel_range(video if video.names() else image, default.video),
        mean=_channels(image, "image_mean", default.mean, above=-256) if normalizes else (0.0, 0.0, 0.0),
        std=_channels(image, "image_std", default.std, above=0) if normalizes else (1.0, 1.0, 1.0),
        rescale=image.number("rescale_factor", default=default.rescale, above=0) if rescales else 1.0,
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


def _resample(fields: Fields, default: int) -> int:
    value = fields.get("resample", default)
    if not isinstance(value, int) or not 0 <= value < RESAMPLINGS:
        raise fields.error("resample", f"must be PIL's number of a filter, 0 to {RESAMPLINGS - 1}, got {value!r}")
    return value
