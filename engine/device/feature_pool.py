"""Pages of features of images: those that an encoder worker computes and sends, and those that land at another worker.

A pool of one layer that keeps one row for each token, so that allocation, transfers and checksums are those of KV.
"""

import torch

from engine.config import EngineConfig
from engine.flags.images import cache_bytes, most_image_tokens
from engine.kv.cache_spec import CacheSpec, page_bytes_of
from engine.kv.kv_pool import AllocateBytes, KVPool
from engine.model_files.model_config import ModelConfig
from engine.model_files.vision_config import VisionConfig
from service.flags import ConfigError

PAGE_TOKENS = 16  # the same on all workers
ARRIVING_SHARE = (
    4  # of --vlm-cache-size-mb, the part of a worker that fetches: features lie there until the next step copies them
)


def feature_spec(model: ModelConfig, vision: VisionConfig, dtype: str) -> CacheSpec:
    """Return the spec of a token's features, a row as the tower gives it."""
    size = model.hidden_size * (1 + vision.deepstack_levels)
    return CacheSpec(1, size, dtype, latent=size)


def arriving_pages(config: EngineConfig, model: ModelConfig, vision: VisionConfig) -> int:
    """Return the pages in which a worker receives features: of the largest image, or a share of the cache, if that is more."""
    assert config.context_length is not None, "resolved"
    largest = -(-min(config.context_length, most_image_tokens(vision)) // PAGE_TOKENS)
    return max(1, largest, cache_bytes(config) // ARRIVING_SHARE // feature_page_bytes(config, model, vision))


def encoded_pages(config: EngineConfig, model: ModelConfig, vision: VisionConfig) -> int:
    """Return the pages that an encoder worker keeps. Raises ConfigError where the cache does not hold one."""
    page_bytes = feature_page_bytes(config, model, vision)
    pages = cache_bytes(config) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"--vlm-cache-size-mb {config.vlm_cache_size_mb}: it holds no page of features, which take {page_bytes} bytes; raise it"
        )
    return pages


def feature_page_bytes(config: EngineConfig, model: ModelConfig, vision: VisionConfig) -> int:
    """`config` is resolved."""
    return page_bytes_of([feature_spec(model, vision, config.dtype)], PAGE_TOKENS)


def feature_pool(
    config: EngineConfig, model: ModelConfig, vision: VisionConfig, *, num_pages: int, allocate: AllocateBytes
) -> KVPool:
    """`config` is resolved. Raises ConfigError."""
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
