"""Memory for image features: --vlm-cache-size-mb. Pure."""

from math import isqrt

from engine.config import EngineConfig, MemoryFlags, ParallelFlags
from engine.core.mem_cache.image_cache import MEGABYTE, ImageCache
from engine.images import KEY_BYTES, ImageInput
from engine.kv.cache_spec import ELEMENT_BYTES
from engine.model_files.model_config import ModelConfig
from engine.model_files.tower_config import CHANNELS, ClipTower, PixelRange
from engine.model_files.vision_config import VisionConfig
from service.flags import ConfigError

DEFAULT_MB = 100  # SGLang's SGLANG_VLM_CACHE_SIZE_MB


def vlm_cache_size_mb(config: MemoryFlags, model: ModelConfig, *, dtype: str, context: int) -> int | None:
    """SGLang's default, or more if an image needs it; None without. Raises ConfigError."""
    given = config.vlm_cache_size_mb
    if model.vision is None:
        if given is not None:
            raise ConfigError(f"--vlm-cache-size-mb {given}: the model sees no images; leave the flag out")
        return None
    if given is not None:
        return given
    tokens = min(context, max_image_tokens(model.vision))
    return max(DEFAULT_MB, -(-tokens * _feature_bytes(model, model.vision, dtype) // MEGABYTE))


def check_encoder(config: ParallelFlags, model: ModelConfig) -> None:
    """Raises ConfigError for --mm-enable-dp-encoder with a text model."""
    if config.mm_enable_dp_encoder and model.vision is None:
        raise ConfigError("--mm-enable-dp-encoder: the model sees no images; leave the flag out")


def image_cache(config: EngineConfig, model: ModelConfig) -> ImageCache | None:
    if model.vision is None:
        return None
    return ImageCache(max_bytes=cache_bytes(config), token_bytes=_feature_bytes(model, model.vision, config.dtype))


def cache_bytes(config: MemoryFlags) -> int:
    """Bytes reserved for features on a rank of the first stage."""
    return (config.vlm_cache_size_mb or 0) * MEGABYTE


def max_image_tokens(vision: VisionConfig) -> int:
    tower, size = vision.tower, vision.processing.size
    if isinstance(tower, ClipTower) or not isinstance(size, PixelRange):
        return vision.num_tokens((1, 1, 1))
    video, pixels = vision.processing.video, size.most
    if vision.tokens_per_second and video is not None and video.over_frames:  # a video is one image of many frames
        pixels = max(pixels, video.most // tower.temporal_patch)
    return pixels // (tower.patch * tower.merge) ** 2


def largest_image(config: MemoryFlags, vision: VisionConfig) -> int:
    """Tokens of the largest image of a prompt."""
    assert config.context_length is not None, "resolved"
    return min(config.context_length, max_image_tokens(vision))


def _feature_bytes(model: ModelConfig, vision: VisionConfig, dtype: str) -> int:
    return model.hidden_size * (1 + vision.deepstack_levels) * ELEMENT_BYTES[dtype]


def blank_image(vision: VisionConfig, most_tokens: int) -> ImageInput:
    """A black image of at most `most_tokens`, or of the tower's size, for warm-up."""
    tower = vision.tower
    if isinstance(tower, ClipTower):
        grid, merge, edge = (tower.num_tokens, 1, 1), 1, tower.side * tower.patch
    else:
        side = max(1, isqrt(most_tokens)) * tower.merge
        grid, merge, edge = (1, side, side), tower.merge, side * tower.patch
    pixels = bytes(edge * edge * CHANNELS)
    return ImageInput(0, vision.num_tokens(grid), bytes(KEY_BYTES), grid, merge, (1, edge, edge), pixels)


def token_flops(vision: VisionConfig) -> int:
    tower = vision.tower
    layer = 4 * tower.hidden_size**2 + 3 * tower.hidden_size * tower.intermediate_size
    return 2 * tower.depth * layer * tower.merge**2
