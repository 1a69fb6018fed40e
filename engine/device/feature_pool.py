"""Image feature pages, computed by an encoder worker or received from one.

One layer with a row per token.
"""

import torch

from engine.config import EngineConfig, ModelFlags
from engine.device.step_memory import EngineUse
from engine.flags.images import cache_bytes, max_image_tokens
from engine.kv.cache_spec import CacheSpec, page_bytes_of
from engine.kv.kv_pool import AllocateBytes, KVPool
from engine.model_files.model_config import ModelConfig
from engine.model_files.vision_config import VisionConfig
from service.flags import ConfigError

PAGE_TOKENS = 16  # same on all workers
ARRIVING_SHARE = 4  # a receiving worker's share of --vlm-cache-size-mb: features stay until the next step's copy


def feature_spec(model: ModelConfig, vision: VisionConfig, dtype: str) -> CacheSpec:
    size = model.hidden_size * (1 + vision.deepstack_levels)
    return CacheSpec(1, size, dtype, latent=size)


def arriving_pages(config: EngineConfig, model: ModelConfig, vision: VisionConfig) -> int:
    """Pages for arriving features: the largest image, or the cache's share."""
    assert config.context_length is not None, "resolved"
    largest = -(-min(config.context_length, max_image_tokens(vision)) // PAGE_TOKENS)
    return max(1, largest, cache_bytes(config) // ARRIVING_SHARE // feature_page_bytes(config, model, vision))


def arriving_bytes(config: EngineConfig, model: ModelConfig, use: EngineUse) -> int:
    if not use.receives_features or model.vision is None:
        return 0
    return (1 + arriving_pages(config, model, model.vision)) * feature_page_bytes(config, model, model.vision)


def arrivals(config: EngineConfig, model: ModelConfig, use: EngineUse) -> KVPool | None:
    """Allocate the pages of arriving features, if any arrive here. Raises ConfigError."""
    if not use.receives_features or model.vision is None:
        return None
    num_pages = arriving_pages(config, model, model.vision)
    return feature_pool(config, model, model.vision, num_pages=num_pages, allocate=use.allocate_kv)


def encoded_pages(config: EngineConfig, model: ModelConfig, vision: VisionConfig) -> int:
    """Raises ConfigError."""
    page_bytes = feature_page_bytes(config, model, vision)
    pages = cache_bytes(config) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"--vlm-cache-size-mb {config.vlm_cache_size_mb}: it holds no page of features, which take {page_bytes} bytes; raise it"
        )
    return pages


def feature_page_bytes(config: ModelFlags, model: ModelConfig, vision: VisionConfig) -> int:
    return page_bytes_of([feature_spec(model, vision, config.dtype)], PAGE_TOKENS)


def feature_pool(
    config: ModelFlags, model: ModelConfig, vision: VisionConfig, *, num_pages: int, allocate: AllocateBytes
) -> KVPool:
    """Raises ConfigError."""
    spec = feature_spec(model, vision, config.dtype)
    try:
        return KVPool(
            [spec], num_pages=num_pages, page_size=PAGE_TOKENS, device=torch.device(config.device), allocate=allocate
        )
    except (MemoryError, OSError, torch.OutOfMemoryError, ValueError) as error:
        size = num_pages * page_bytes_of([spec], PAGE_TOKENS) / 2**20
        raise ConfigError(
            f"--vlm-cache-size-mb: no memory for {size:.0f} MB of features ({error}); lower it"
        ) from error
